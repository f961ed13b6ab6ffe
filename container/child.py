"""The few lines that run in a child before the web or the runner does.

`python -P child.py PARENT SIGNAL MODULE FILE` asks the kernel to send SIGNAL when the parent is
gone, then runs MODULE as `python -m MODULE ARGUMENT` would, ARGUMENT being what FILE holds: on a
command line it would show the API key to everybody who may list processes, and could be too long.
The request to the kernel is made here because making it between fork and exec is not safe in a
parent with threads; and children cannot be trusted to watch their parent instead, as a runner that
waits for the GPU would not look.

Must not know: any other module of the project.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main(parent: int, death_signal: int, module: str, file: str) -> None:
    """Become `module`. Only Linux knows the request to the kernel."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:  # gone before the call above
            sys.exit(1)
    sys.argv = [module, Path(file).read_text(encoding="utf-8")]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
