"""A copy of the project in which the web and the runner are small stand-ins with real signals.

`Box` runs the copy's `serve` as a real process. Files in its `world` folder say how the stand-ins
behave and what happened to them. Must not know: Flask, torch.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent

_COMMON = """
import os, signal, sys, time
from pathlib import Path

world = Path(os.environ["STAND_IN_WORLD"])
name = Path(__file__).stem

def event(what):
    with (world / "events").open("a") as file:
        file.write(f"{name} {what}\\n")

def asked(what):
    return (world / what).exists()
"""

_WEB = (
    _COMMON
    + """
import http.server, json, threading

start = json.loads(sys.argv[1])
(world / "web.json").write_text(sys.argv[1])
(world / "web.environ").write_text(json.dumps(dict(os.environ)))
stopping = threading.Event()

def on_term(number, frame):
    event("term")
    if not asked("web-deaf"):
        stopping.set()

def on_int(number, frame):
    event("int")
    os._exit(0)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "the-model"}]}).encode()
        self.send_response(200 if asked("ready") else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        asked_for = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        event("post " + self.path)
        key = settings["api_key"]
        allowed = key is None or self.headers["Authorization"] == "Bearer " + key
        choice = {"index": 0, "message": {"role": "assistant", "content": "hello " + str(allowed)}}
        body = json.dumps({"id": "1", "choices": [choice], "asked": asked_for}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass

signal.signal(signal.SIGTERM, on_term)
signal.signal(signal.SIGINT, on_int)
settings = start["settings"]
server = http.server.ThreadingHTTPServer(("127.0.0.1", settings["port"]), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
(world / "web.pid").write_text(str(os.getpid()))
event("up")
while not stopping.wait(0.02):
    if asked("web-dies"):
        os._exit(7)
while asked("web-busy"):
    time.sleep(0.02)
event("end")
"""
)

_RUNNER = (
    _COMMON
    + """
import json

def on_term(number, frame):
    event("term")
    if not asked("runner-deaf"):
        os._exit(0)

signal.signal(signal.SIGTERM, on_term)
(world / "runner.json").write_text(sys.argv[1])
(world / "runner.environ").write_text(json.dumps(dict(os.environ)))
(world / "runner.pid.new").write_text(str(os.getpid()))
(world / "runner.pid.new").rename(world / "runner.pid")
event("up")
while not asked("web.pid"):
    time.sleep(0.01)
if asked("runner-code"):
    sys.exit(int((world / "runner-code").read_text()))
while True:
    time.sleep(1)
"""
)

MODEL_FILES = {
    "config.json": '{"model_type": "llama"}',
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
}


def until(condition: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    """Wait until `condition` is true; its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.01)
    return value


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Box:
    """One `serve` process of the copied project, and the files to steer it by."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self.world = folder / "world"
        self.temporary = folder / "t"
        self.model = folder / "model"
        for path in (self.world, self.temporary, self.model, self.project / "container/web"):
            path.mkdir(parents=True)
        for name, content in MODEL_FILES.items():
            (self.model / name).write_text(content)
        for path in (ROOT / "container").glob("*.py"):
            shutil.copy(path, self.project / "container")
        (self.project / "container/web/server.py").write_text(_WEB)
        runner = self.project / "handler/runner"
        runner.mkdir(parents=True)
        for name in ("config.py", "logging_setup.py"):
            shutil.copy(ROOT / "handler/runner" / name, runner)
        (runner / "process.py").write_text(_RUNNER)
        shutil.copy(ROOT / "serve", self.project)
        self.port = free_port()
        self._log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, cwd: Path | None = None, **environ: str) -> "Box":
        """Run serve on the model; flags come after `--model-id` and `--port`."""
        command = [sys.executable, str(self.project / "serve"), "serve", "--port", str(self.port)]
        if not any(flag.startswith("--model-id") for flag in flags):
            command += ["--model-id", str(self.model)]
        inherited = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                cwd=cwd or self.world,
                env={
                    **inherited,
                    "STAND_IN_WORLD": str(self.world),
                    "TMPDIR": str(self.temporary),
                    **environ,
                },
                stdout=log,
                stderr=log,
            )
        return self

    def started(self, *flags: str, cwd: Path | None = None, **environ: str) -> "Box":
        """Run serve and wait until both children are up."""
        self.start(*flags, cwd=cwd, **environ)
        until(lambda: {"server up", "process up"} <= set(self.events))
        return self

    def ask(self, what: str, content: str = "") -> None:
        """Make the stand-ins behave in some way; see their source."""
        (self.world / what).write_text(content)

    def unask(self, what: str) -> None:
        (self.world / what).unlink()

    @property
    def events(self) -> list[str]:
        """What happened to the stand-ins; `server` is the web, `process` the runner."""
        path = self.world / "events"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def log(self) -> str:
        return self._log.read_text()

    def pid(self, name: str) -> int:
        return int(until((self.world / f"{name}.pid").read_text))

    def told(self, name: str) -> dict[str, Any]:
        """The JSON argument a child was started with, or its environment (`web.environ`)."""
        path = self.world / (name if "." in name else f"{name}.json")
        decoded: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        return decoded

    @property
    def phase(self) -> str:
        return (Path(self.told("web")["run_dir"]) / "phase").read_text().strip()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def exit_code(self, timeout_s: float = 15.0) -> int:
        """Wait for serve to end by itself."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        self.send(signal.SIGTERM)
        return self.exit_code()

    def close(self) -> None:
        """Leave nothing running, whatever the test did."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for name in ("web", "runner"):
            path = self.world / f"{name}.pid"
            if path.exists() and is_running(pid := int(path.read_text())):
                os.kill(pid, signal.SIGKILL)
