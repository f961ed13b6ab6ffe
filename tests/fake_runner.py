"""A scripted runner on a real ROUTER socket: the protocol without torch.

It repeats the prompt: token i of a continuation is `prompt_ids[i % len(prompt_ids)]`, one token per
sequence and step, so that a test can see crossed or reordered streams. Usable from a thread
(`with FakeRunner(...)`, which also shows what it saw) or as a process of its own
(`spawn(...)`, which can be killed). Must not know: HTTP, gevent, the client.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec
import zmq

from handler.runner.protocol import (
    Abort,
    Batch,
    Event,
    Failed,
    FailureKind,
    Finished,
    Generate,
    Hello,
    Loading,
    ModelCard,
    PromptLogprobs,
    Ready,
    Tokens,
    ToWorker,
    decode_to_runner,
    encode,
)

ROOT = Path(__file__).resolve().parent.parent


def make_card(tokenizer_path: str = "", chat_template: str | None = None) -> ModelCard:
    """A card for a model that does not exist."""
    return ModelCard(
        model_id="fake/model",
        revision=None,
        model_type="fake",
        tokenizer_path=tokenizer_path,
        special_tokens={},
        special_token_ids=[],
        eos_token_ids=[],
        chat_templates={} if chat_template is None else {"default": chat_template},
        chat_template_source="tests",
        clean_up_tokenization_spaces=False,
        vocab_size=1000,
        max_input_tokens=1000,
        max_total_tokens=1024,
        dtype="float32",
        device="cpu",
        device_name="cpu",
        attention="none",
        kv_capacity_tokens=4096,
        max_batch_size=128,
    )


class Failure(msgspec.Struct, frozen=True):
    """Sequences whose prompt starts with `first_id` fail after `num_tokens` tokens."""

    first_id: int
    kind: FailureKind
    message: str = "scripted failure"
    num_tokens: int = 0


class Script(msgspec.Struct, frozen=True):
    """How the runner behaves."""

    endpoint: str
    card: ModelCard
    step_s: float = 0.0
    loading: str | None = None
    """A phase to report instead of Ready, until `become_ready` is called."""
    failures: list[Failure] = []
    incarnation: str = ""


class _Sequence:
    def __init__(self, worker: bytes, request: Generate, step: int) -> None:
        self.worker = worker
        self.request = request
        self.num_tokens = 0
        self.arrived_at_step = step


class FakeRunner:
    """The runner in a thread. Attributes may be read by the test at any time."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.incarnation = script.incarnation or os.urandom(4).hex()
        self.requests: list[Generate] = []
        self.aborts: list[tuple[str, int]] = []
        """`(request_id, tokens it had been given)`, in the order of arrival."""
        self.num_hellos = 0
        self.num_steps = 0
        self.changed = threading.Condition()
        self._loading = script.loading
        self._gate = threading.Event()
        self._gate.set()
        self._stop = threading.Event()
        self._running: dict[tuple[bytes, str], _Sequence] = {}
        self._workers: set[bytes] = set()
        self._thread = threading.Thread(target=self.serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return len(self._running)

    def hold(self) -> None:
        """Take no step until `release`."""
        self._gate.clear()

    def release(self) -> None:
        """Take steps again."""
        self._gate.set()

    def become_ready(self) -> None:
        """End the scripted loading; workers that said hello are told."""
        self._loading = None

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until something the runner saw makes `condition()` true."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), "the runner never saw it"

    def start_over(self, incarnation: str) -> None:
        """Forget every sequence and announce another incarnation, on the same connection."""
        self._running.clear()
        self.incarnation = incarnation

    def serve(self) -> None:
        """Run until stopped."""
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self.script.endpoint)
        announced = "" if self._loading else self.incarnation
        next_step = time.monotonic()
        try:
            while not self._stop.is_set():
                busy = bool(self._running) and self._gate.is_set()
                wait_s = max(0.0, next_step - time.monotonic()) if busy else 0.02
                socket.poll(round(wait_s * 1000))
                while socket.poll(0):
                    worker, frame = socket.recv_multipart()
                    self._receive(socket, worker, frame)
                if self._loading is None and announced != self.incarnation:
                    announced = self.incarnation
                    for worker in self._workers:
                        self._send(socket, worker, self._state())
                if self._gate.is_set() and self._running and time.monotonic() >= next_step:
                    next_step = time.monotonic() + self.script.step_s
                    self._step(socket)
                with self.changed:
                    self.changed.notify_all()
        finally:
            socket.close(linger=0)
            context.term()

    def _state(self) -> Loading | Ready:
        if self._loading is not None:
            return Loading(self._loading)
        return Ready(self.script.card, self.incarnation)

    def _send(self, socket: "zmq.Socket[bytes]", worker: bytes, message: ToWorker) -> None:
        socket.send_multipart([worker, encode(message)])

    def _receive(self, socket: "zmq.Socket[bytes]", worker: bytes, frame: bytes) -> None:
        message = decode_to_runner(frame)
        if isinstance(message, Hello):
            self.num_hellos += 1
            self._workers.add(worker)
            self._send(socket, worker, self._state())
        elif isinstance(message, Generate):
            self.requests.append(message)
            sequence = _Sequence(worker, message, self.num_steps)
            self._running[worker, message.request_id] = sequence
        elif isinstance(message, Abort):
            gone = self._running.pop((worker, message.request_id), None)
            self.aborts.append((message.request_id, gone.num_tokens if gone else -1))

    def _step(self, socket: "zmq.Socket[bytes]") -> None:
        self.num_steps += 1
        batches: dict[bytes, list[Event]] = {}
        for key, sequence in list(self._running.items()):
            events = self._advance(sequence)
            batches.setdefault(sequence.worker, []).extend(events)
            if isinstance(events[-1], Finished | Failed):
                del self._running[key]
        for worker, batch in batches.items():
            self._send(socket, worker, Batch(batch))

    def _advance(self, sequence: _Sequence) -> list[Event]:
        request = sequence.request
        for failure in self.script.failures:
            is_due = sequence.num_tokens >= failure.num_tokens
            if is_due and request.prompt_ids[0] == failure.first_id:
                return [Failed(request.request_id, failure.kind, failure.message)]
        events: list[Event] = []
        if request.prompt_logprobs and sequence.num_tokens == 0:
            logprobs: list[float | None] = [-1.0] * len(request.prompt_ids)
            logprobs[0] = None
            events.append(PromptLogprobs(request.request_id, logprobs))
        token = request.prompt_ids[sequence.num_tokens % len(request.prompt_ids)]
        sequence.num_tokens += 1
        if request.logprobs is None:
            events.append(Tokens(request.request_id, [token]))
        else:
            top = [(token, -0.5)] * request.logprobs
            events.append(Tokens(request.request_id, [token], [-0.5], [top]))
        if sequence.num_tokens >= request.max_new_tokens:
            events.append(Finished(request.request_id, "length", queue_s=0.001, inference_s=0.002))
        return events


@contextmanager
def spawn(script: Script) -> Iterator[subprocess.Popen[bytes]]:
    """The runner as a process of its own, for tests that kill it."""
    argument = msgspec.json.encode(script).decode()
    process = subprocess.Popen([sys.executable, "-m", "tests.fake_runner", argument], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    FakeRunner(msgspec.json.decode(sys.argv[1], type=Script)).serve()
