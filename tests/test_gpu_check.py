"""scripts/gpu_check.py runs anywhere with tiny shapes, and with torch and transformers alone."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ABSENT_ON_THE_GPU_MACHINE = ("flask", "gunicorn", "gevent", "zmq", "msgspec", "pydantic")


def test_tiny_shapes_pass_where_only_torch_and_transformers_are() -> None:
    program = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT_ON_THE_GPU_MACHINE!r}))\n"  # None: cannot import
        "sys.argv = ['gpu_check.py', '--tiny', '--cpu', '--new-tokens', '4']\n"
        "runpy.run_path('scripts/gpu_check.py', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["passed"]
    assert [row["batch"] for row in result["rows"]] == [1, 8, 64]
    assert all(row["transformers_cb"] for row in result["rows"])
