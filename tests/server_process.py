"""The server as a real process: start it, wait for it, read its log, stop it.

Must not know: the inside of the product; what a test sends to it.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 35.0
SETTINGS_PREFIXES = ("HF_", "HUGGING", "SM_", "SAGEMAKER_", "MODEL_ID", "PORT", "MAX_", "INVOCANT_")


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get_status(url: str, timeout_s: float = 5.0) -> int | None:
    """The status of a GET, or None where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


@dataclass
class Server:
    """A running `serve`, and what to do with it."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    stopped: bool = field(default=False)

    @property
    def log(self) -> str:
        """Everything it has written to standard output and error."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_ping(self, status: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until GET /ping answers `status`; fails the test with the log where it never does."""
        deadline = time.monotonic() + timeout_s
        while get_status(f"{self.url}/ping") != status:
            if (code := self.process.poll()) is not None:
                pytest.fail(f"serve exited with {code}:\n{self.log}")
            if time.monotonic() > deadline:
                pytest.fail(f"/ping did not answer {status} in {timeout_s} s:\n{self.log}")
            time.sleep(0.05)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.stopped = True
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"serve was still there {STOP_TIMEOUT_S} s after SIGTERM:\n{self.log}")

    def kill(self) -> None:
        """End it and its children at once (they share a process group of their own)."""
        self.stopped = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


class Servers:
    """Starts servers, and at the end stops each one and expects exit code 0."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.started: list[Server] = []

    def __call__(
        self,
        model: Path | str,
        *arguments: str,
        env: dict[str, str] | None = None,
        wait: bool = True,
    ) -> Server:
        """`serve --model-id MODEL --port <free> ARGUMENTS`, ready unless `wait` is false."""
        port = free_port()
        command = [sys.executable, str(ROOT / "serve"), "--model-id", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        log_path = self._logs / f"serve-{port}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean_environment() | (env or {}),
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", process, log_path)
        self.started.append(server)
        if wait:
            server.wait_for_ping(200)
        return server

    def close(self) -> None:
        """Stop what still runs; leave nothing behind whatever happens."""
        try:
            for server in self.started:
                if not server.stopped:
                    code = server.stop()
                    assert code == 0, f"serve exited with {code} after SIGTERM:\n{server.log}"
        finally:
            for server in self.started:
                server.kill()


def clean_environment() -> dict[str, str]:
    """This environment without settings of a server that a developer may have made."""
    return {n: value for n, value in os.environ.items() if not n.startswith(SETTINGS_PREFIXES)}
