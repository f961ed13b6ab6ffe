"""The few lines that run as a child before it becomes the web or the runner.

`python -I -S child.py PARENT SIGNAL PROGRAM ARGUMENT...` asks the kernel to send SIGNAL when the
parent is gone, then executes PROGRAM in the same process. A program of its own because doing this
between fork and exec is not safe in a parent with threads. Children cannot be trusted to watch
their parent instead: a runner that waits for the GPU would not look.

Must not know: any other module of the project (it runs without them on its path).
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, death_signal: int, program: list[str]) -> None:
    """Become `program`; does not return. Only Linux knows the request to the kernel."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:  # gone before the call above
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
