"""How many key/value pages fit: what is free, what a page takes, what can be of use.

Must not know: attention's layout, requests.
"""

from __future__ import annotations

from pathlib import Path

import torch

from handler.runner.errors import CannotServeError

CPU_SHARE = 0.5
"""On the CPU free memory is everybody's; of the share asked for, half goes to the pages."""

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on the device; containers' limits are honoured."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch's allocator holds but does not use is free to us as well.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held
    free = _meminfo_available()
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None:
            free = min(free, limit - usage)
    return free


def num_pages(
    bytes_per_page: int,
    page_size: int,
    device: torch.device,
    *,
    fraction: float,
    asked_bytes: int | None,
    useful_tokens: int,
    reserved_bytes: int,
) -> int:
    """Pages to allocate, at least one.

    `asked_bytes` rules where given; else the `fraction` of what is free after `reserved_bytes`
    (working memory of a step). Never more than `useful_tokens` tokens could fill.
    """
    budget = asked_bytes
    if budget is None:
        share = fraction if device.type == "cuda" else fraction * CPU_SHARE
        budget = int((free_bytes(device) - reserved_bytes) * share)
    count = min(budget // bytes_per_page, -(-useful_tokens // page_size))
    if count < 1:
        raise CannotServeError(
            f"no memory for the key/value cache: {budget / 2**20:.0f} MiB are left for it and one "
            f"page of {page_size} tokens takes {bytes_per_page / 2**20:.1f} MiB; free memory or "
            "choose a smaller model or --dtype"
        )
    return count


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise CannotServeError("/proc/meminfo does not tell how much memory is available")


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
