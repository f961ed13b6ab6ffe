"""The runner as a worker meets it: a real process at the other end of a real socket."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from handler.runner.config import RunnerConfig
from handler.runner.protocol import (
    Abort,
    Batch,
    Event,
    Failed,
    Finished,
    Generate,
    Hello,
    Loading,
    Ready,
    Sampling,
    Tokens,
    ToRunner,
    ToWorker,
    decode_to_worker,
    encode,
)
from server_process import ROOT

TIMEOUT_MS = 60_000
GREEDY = Sampling(temperature=0)


class Worker:
    """A DEALER socket that speaks the protocol."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def send(self, message: ToRunner) -> None:
        self.socket.send(encode(message))

    def receive(self) -> ToWorker:
        return decode_to_worker(self.socket.recv())

    def wait_until_ready(self) -> Ready:
        while True:
            self.send(Hello())
            answer = self.receive()
            if isinstance(answer, Ready):
                return answer

    def events(self) -> Iterator[Event]:
        """Events as they come, Ready messages left out."""
        while True:
            message = self.receive()
            if isinstance(message, Batch):
                yield from message.events


class RunnerProcess:
    """`python -m handler.runner.process` on a model."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self.endpoint = f"ipc://{scratch}/r"
        config = RunnerConfig(self.endpoint, str(model), "scripted", str(scratch), num_threads=1)
        argument = msgspec.json.encode(config).decode()
        command = [sys.executable, "-m", "handler.runner.process", argument]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(20)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


Connect = Callable[[RunnerProcess], Worker]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes workers, whose sockets the fixture closes."""
    context = zmq.Context()
    workers: list[Worker] = []

    def one(runner: RunnerProcess) -> Worker:
        workers.append(Worker(context, runner.endpoint))
        return workers[-1]

    yield one
    for worker in workers:
        worker.socket.close()
    context.term()


@pytest.fixture
def start(
    scripted_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], RunnerProcess]]:
    started: list[RunnerProcess] = []

    def start_one() -> RunnerProcess:
        started.append(RunnerProcess(scripted_model, tmp_path_factory.mktemp("r")))
        return started[-1]

    yield start_one
    for runner in started:
        if runner.process.poll() is None:
            runner.process.kill()
            runner.process.wait()


def test_it_answers_while_it_loads_and_says_ready_unasked(
    start: Callable[[], RunnerProcess], connect: Connect
) -> None:
    runner = start()
    worker = connect(runner)
    worker.send(Hello())
    worker.send(Generate("early", [5], 4))
    first = worker.receive()
    assert isinstance(first, Loading)
    assert first.phase
    refusal = worker.receive()
    assert isinstance(refusal, Batch)
    assert isinstance(refusal.events[0], Failed)
    assert refusal.events[0].kind == "unavailable"
    ready = worker.receive()  # nothing was asked in between
    assert isinstance(ready, Ready)
    assert ready.card.model_id == "scripted"
    assert Path(ready.card.tokenizer_path).is_file()
    assert runner.stop() == 0


def test_garbage_vanished_workers_and_aborts_leave_the_others_alone(
    start: Callable[[], RunnerProcess], connect: Connect
) -> None:
    runner = start()
    worker, other = connect(runner), connect(runner)
    card = worker.wait_until_ready().card
    other.wait_until_ready()
    worker.socket.send(b"\x93garbage")
    worker.socket.send_multipart([b"two", b"frames"])
    other.send(Generate("gone", [5], card.max_total_tokens - 1, GREEDY, ignore_eos=True))
    next(other.events())
    other.socket.close()
    worker.send(Generate("stopped", [6], card.max_total_tokens - 1, GREEDY, ignore_eos=True))
    worker.send(Generate("short", [7, 8], 3, GREEDY, ignore_eos=True))
    events = worker.events()
    for event in events:
        if event.request_id == "stopped":
            worker.send(Abort("stopped"))
            break
    own = []
    for event in events:
        if event.request_id == "short":
            own.append(event)
            if isinstance(event, Finished):
                break
    assert sum(isinstance(event, Tokens) for event in own) == 3
    assert runner.stop() == 0


def test_sigterm_while_loading_is_an_ordinary_end(
    start: Callable[[], RunnerProcess], connect: Connect
) -> None:
    """Torch may be at work in the loader's thread: that must not turn the end into an abort."""
    phases = set()
    for wanted in ("importing", "loading the weights"):
        runner = start()
        worker = connect(runner)
        while True:
            worker.send(Hello())
            answer = worker.receive()
            phases.add(answer.phase if isinstance(answer, Loading) else "ready")
            if isinstance(answer, Ready) or answer.phase.startswith(wanted):  # type: ignore[union-attr]
                break
        assert runner.stop() == 0
    assert any(phase.startswith("importing") for phase in phases)
