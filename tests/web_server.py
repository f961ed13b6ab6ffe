"""Runs a web server as a process for a test. Must not know: what it serves."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Web:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    endpoint: str
    run_dir: Path
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ping(self) -> int:
        return requests.get(f"{self.url}/ping", timeout=5).status_code

    def wait_for_ping(self, status: int, timeout_s: float = 20.0) -> float:
        """How long it took until /ping answered `status`."""
        start = time.monotonic()
        while True:
            try:
                if self.ping() == status:
                    return time.monotonic() - start
            except requests.ConnectionError:
                assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - start < timeout_s, self.log.read_text()
            time.sleep(0.01)

    def post(self, path: str, body: Any = None, **rest: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=30, **rest)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(folder: Path, module: str = "tests.web_stand_in", **settings: Any) -> Iterator[Web]:
    """A server on a free port; its runner is to be served at `web.endpoint`."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    endpoint = f"ipc://{folder}/runner"
    chosen = {"host": "127.0.0.1", "port": port, "num_workers": 1} | settings
    argument = json.dumps({"settings": chosen, "endpoint": endpoint, "run_dir": str(folder)})
    log = folder / "web.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", module, argument], cwd=ROOT, stderr=stderr, text=True
        )
    try:
        yield Web(process, port, endpoint, folder, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
