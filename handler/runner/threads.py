"""How many threads torch computes with: what this process may really use of the machine.

Must not know: the model, OpenMP's settings (launch gives those in the environment).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

GPU_HOST_THREADS = 8
"""With a GPU the CPU only prepares small tensors; a thread per core of a large host would cost."""

_QUOTA_V2 = "sys/fs/cgroup/cpu.max"
_QUOTA_V1 = ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us")


def num_threads(device_type: str, root: Path = Path("/")) -> int:
    """The cores this process may run on, no more than its container's CPU quota pays for.

    A container limited to 4 CPUs still sees all cores of its host; as many threads as cores would
    wait for each other at every barrier. `root` is where `/sys` is looked for.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota(root)
    if quota is not None:
        cores = min(cores, max(1, math.ceil(quota)))
    return cores if device_type == "cpu" else min(cores, GPU_HOST_THREADS)


def _quota(root: Path) -> float | None:
    """CPUs the cgroup may use; None without a limit."""
    try:
        quota, period = (root / _QUOTA_V2).read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((root / name).read_text().strip() for name in _QUOTA_V1)
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit():  # "max", or -1
        return None
    return int(quota) / int(period)
