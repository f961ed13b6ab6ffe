"""Keeps the web and the runner alive as children: start, restart, signals, stop, exit code.

The web starts at once. The runner starts when `prepare`, which runs in a thread because it may
download for minutes, has given its command. Everything else happens in one loop on the main thread
that sleeps until a signal, the end of a child or a deadline. Children are waited for by their own
pid, never all at once, so that nothing another library started is taken away from it.

Must not know: settings, models, HTTP; what the children do.
"""

import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_CANNOT_SERVE = 3
"""A runner that ends with this code can never start: it is not started again."""

_RUNNER_STOP_S = 3.0
"""For the runner after SIGTERM; with 25 s of grace before it all is over before SageMaker kills."""
_HURRIED_STOP_S = 2.0
_LONGEST_BACK_OFF_S = 30.0
_CHILD = Path(__file__).with_name("child.py")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    """A child to start: a module, its argument in a file of ours, and where it runs.

    `death_signal` is what the kernel sends it when we are killed ourselves.
    """

    name: str
    module: str
    argument_file: Path
    environment: Mapping[str, str]
    folder: Path
    death_signal: signal.Signals


class CannotServeError(Exception):
    """Raised by `prepare`: the model can never be served. The message is one sentence."""


@dataclass(frozen=True)
class RestartPolicy:
    """At most `max_restarts` in any `window_s`; the pause before each doubles."""

    max_restarts: int
    window_s: float = 600.0
    first_back_off_s: float = 0.5


class Supervisor:
    """Runs until told to stop or until something fails for good; `run` returns the exit code."""

    def __init__(
        self,
        web: Command,
        prepare: Callable[[], Command],
        *,
        report: Callable[[str], None],
        graceful_timeout_s: float,
        restarts: RestartPolicy,
    ) -> None:
        """`report` is told in a few words what is going on when the runner is not serving."""
        self._web_command = web
        self._prepare = prepare
        self._report = report
        self._graceful_timeout_s = graceful_timeout_s
        self._restarts = restarts
        self._web: subprocess.Popen[bytes] | None = None
        self._runner: subprocess.Popen[bytes] | None = None
        self._runner_command: Command | None = None
        self._prepared: queue.SimpleQueue[Command | CannotServeError] = queue.SimpleQueue()
        self._crash_times_s: deque[float] = deque()
        self._start_runner_at_s: float | None = None
        self._num_stop_signals = 0
        self._wake_up = os.pipe()

    def run(self) -> int:
        """Start the children and look after them. Call on the main thread."""
        with self._signals():
            self._web = _start(self._web_command)
            threading.Thread(target=self._run_prepare, name="prepare", daemon=True).start()
            try:
                code = self._watch()
                self._stop(self._graceful_timeout_s if code == EXIT_STOPPED else _HURRIED_STOP_S)
            finally:
                for child in (self._web, self._runner):
                    _kill(child)
        return code

    def _run_prepare(self) -> None:
        """In a thread: hand the runner's command, or why there is none, to the loop."""
        try:
            self._prepared.put(self._prepare())
        except CannotServeError as error:
            self._prepared.put(error)
        except Exception as error:  # noqa: BLE001 - the loop must hear of it, whatever it was
            _log.exception("Preparing the model failed")
            self._prepared.put(CannotServeError(f"Preparing the model failed: {error}"))
        self._wake()

    def _watch(self) -> int:
        """Loop until there is a reason to stop; the exit code that follows from it."""
        while self._num_stop_signals == 0:
            if self._web is not None and self._web.poll() is not None:
                _log.error("The web process ended (%s); stopping.", _how(self._web.returncode))
                return EXIT_FAILED
            code = self._look_after_runner()
            if code is not None:
                return code
            self._sleep(self._start_runner_at_s)
        _log.info("Stopping; waiting up to %g s for running requests.", self._graceful_timeout_s)
        return EXIT_STOPPED

    def _look_after_runner(self) -> int | None:
        """Start the runner when it is due, notice its end; an exit code if that is final."""
        if self._runner is None:
            try:
                prepared = self._prepared.get_nowait()
            except queue.Empty:
                pass
            else:
                if isinstance(prepared, CannotServeError):
                    _log.error("%s", prepared)
                    return EXIT_CANNOT_SERVE
                self._runner_command = prepared
                self._start_runner_at_s = time.monotonic()
        elif self._start_runner_at_s is None and self._runner.poll() is not None:
            return self._after_crash(self._runner.returncode)
        due_s = self._start_runner_at_s
        if due_s is not None and self._runner_command and due_s <= time.monotonic():
            self._start_runner_at_s = None
            if self._runner is None:  # else what was said about its end is worth more
                self._report("starting the runner")
            self._runner = _start(self._runner_command)
        return None

    def _after_crash(self, return_code: int) -> int | None:
        """Plan the next start of a runner that ended by itself, or give up."""
        _kill(self._runner)  # helpers it may have left, which hold memory
        how = _how(return_code)
        if return_code == EXIT_CANNOT_SERVE:
            _log.error("The runner cannot serve this model; stopping.")
            return EXIT_CANNOT_SERVE
        now_s = time.monotonic()
        while self._crash_times_s and self._crash_times_s[0] < now_s - self._restarts.window_s:
            self._crash_times_s.popleft()
        if len(self._crash_times_s) >= self._restarts.max_restarts:
            _log.error(
                "The runner ended (%s) after %d restarts in %g s; giving up.",
                how,
                len(self._crash_times_s),
                self._restarts.window_s,
            )
            return EXIT_FAILED
        back_off_s = self._restarts.first_back_off_s * 2 ** len(self._crash_times_s)
        back_off_s = min(back_off_s, _LONGEST_BACK_OFF_S)
        self._crash_times_s.append(now_s)
        self._start_runner_at_s = now_s + back_off_s
        _log.warning("The runner ended (%s); starting it again in %g s.", how, back_off_s)
        self._report(f"restarting the runner ({how})")
        return None

    def _stop(self, grace_s: float) -> None:
        """The web first, so that what runs can finish; then the runner."""
        self._report("stopping")
        self._end(self._web, grace_s, after_second=signal.SIGINT)
        self._end(self._runner, _RUNNER_STOP_S, after_second=signal.SIGTERM)

    def _end(
        self,
        child: subprocess.Popen[bytes] | None,
        grace_s: float,
        *,
        after_second: signal.Signals,
    ) -> None:
        """SIGTERM, then wait; a second stop signal sends `after_second` and shortens the wait."""
        if child is None or child.poll() is not None:
            return
        child.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        is_hurried = False
        while child.poll() is None and time.monotonic() < deadline_s:
            if self._num_stop_signals > 1 and not is_hurried:
                is_hurried = True
                child.send_signal(after_second)
                deadline_s = min(deadline_s, time.monotonic() + _HURRIED_STOP_S)
            self._sleep(deadline_s)
        if child.poll() is None:
            _log.warning("Process %d did not end within %g s; killing it.", child.pid, grace_s)

    def _sleep(self, until_s: float | None) -> None:
        """Until a signal, the end of a child, the end of `prepare`, or a monotonic time."""
        timeout_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        readable, _, _ = select.select([self._wake_up[0]], [], [], timeout_s)
        if readable:
            os.read(self._wake_up[0], 4096)

    def _wake(self) -> None:
        os.write(self._wake_up[1], b"\0")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take SIGTERM, SIGINT and SIGCHLD while we run; Python writes each to the wake-up pipe."""
        os.set_blocking(self._wake_up[1], False)
        former_fd = signal.set_wakeup_fd(self._wake_up[1], warn_on_full_buffer=False)
        taken = {
            signal.SIGTERM: self._on_stop_signal,
            signal.SIGINT: self._on_stop_signal,
            signal.SIGCHLD: _ignore,
        }
        former = {number: signal.signal(number, handler) for number, handler in taken.items()}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_fd)

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._num_stop_signals += 1


def _ignore(number: int, frame: FrameType | None) -> None:
    """SIGCHLD needs a handler, or Python would not write to the wake-up pipe."""


def _how(return_code: int) -> str:
    return f"killed by signal {-return_code}" if return_code < 0 else f"exit code {return_code}"


def _start(command: Command) -> subprocess.Popen[bytes]:
    """Start a child in a process group of its own: Ctrl-C reaches us alone, and we pass it on.

    Call on the main thread: the kernel ties `death_signal` to the thread that starts the child.
    """
    # -P: nothing in the working directory or beside child.py can take a module's place.
    program = [sys.executable, "-P", str(_CHILD)]
    wish = [str(os.getpid()), str(command.death_signal.value)]
    child = subprocess.Popen(
        [*program, *wish, command.module, str(command.argument_file)],
        env=dict(command.environment),
        cwd=command.folder,
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    _log.info("Started the %s (process %d).", command.name, child.pid)
    return child


def _kill(child: subprocess.Popen[bytes] | None) -> None:
    """Kill what is left of a child's process group, and reap the child."""
    if child is None:
        return
    with suppress(ProcessLookupError, PermissionError):  # nothing of it is left
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
