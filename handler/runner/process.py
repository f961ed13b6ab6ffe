"""The runner process: answers workers from its first second, loads, then steps the engine.

One thread owns the socket and, once loaded, the engine: it takes every waiting message between
two steps and blocks only when there is nothing to compute. Loading happens beside it in a thread
of its own, so that workers learn the phase meanwhile. Exit codes: 0 after SIGTERM, 3 when the
model can never be served (one sentence on standard error), anything else for faults.

Must not know: HTTP, the APIs, text, the environment.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import sys
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
import zmq

from handler.runner import logging_setup
from handler.runner.config import RunnerConfig
from handler.runner.errors import CannotServeError
from handler.runner.protocol import (
    Abort,
    Batch,
    Event,
    Failed,
    Generate,
    Hello,
    Loading,
    ModelCard,
    Ready,
    decode_to_runner,
    encode,
)

if TYPE_CHECKING:
    from types import FrameType

    from handler.runner.inflight import Requests

logger = logging.getLogger(__name__)

EXIT_CANNOT_SERVE = 3
IDLE_POLL_MS = 200
"""How long a signal may wait to be noticed when there is nothing to do."""

SEND_LIMIT = 10_000
"""Messages queued for one worker before it counts as dead."""


class Mailbox:
    """The ROUTER socket: whole messages in, events out, dead workers noticed."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    def receive(self, timeout_ms: int) -> list[tuple[bytes, Hello | Generate | Abort]]:
        """Every message that is there; waits up to `timeout_ms` for the first."""
        messages = []
        if self._socket.poll(timeout_ms):
            while True:
                try:
                    worker, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    messages.append((worker, decode_to_runner(b"".join(frames))))
                except msgspec.DecodeError as error:
                    logger.error("a message that cannot be read was dropped: %s", error)
        return messages

    def send(self, worker: bytes, message: Loading | Ready | Batch) -> bool:
        """False when the worker is gone (or has stopped reading)."""
        try:
            self._socket.send_multipart([worker, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


class Runner:
    """The life of the process: load while answering, then serve."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self.mailbox = Mailbox(config.endpoint)
        self.incarnation = secrets.token_hex(8)
        self.stopping = False
        self._workers: set[bytes] = set()
        self._phase = "starting"
        self._loaded: tuple[Requests, ModelCard] | None = None
        self._load_error: BaseException | None = None

    def stop(self, _signum: int, _frame: FrameType | None) -> None:
        """Signal handler."""
        self.stopping = True

    def run(self) -> int:
        """Until stopped; the exit code."""
        loader = threading.Thread(target=self._load, name="loader", daemon=True)
        loader.start()
        while loader.is_alive() and not self.stopping:
            self._answer_while_loading()
        if self._load_error is not None:
            return _explain(self._load_error)
        if self._loaded is not None and not self.stopping:
            requests, card = self._loaded
            self._announce(card)
            self._serve(requests, card)
        return 0

    def _load(self) -> None:
        def set_phase(phase: str) -> None:
            self._phase = phase
            logger.info("%s", phase)

        try:
            set_phase("importing torch and transformers")
            from handler.runner.build import build_engine
            from handler.runner.inflight import Requests

            engine, card = build_engine(self.config, set_phase)
            limit = self.config.max_concurrent_requests
            self._loaded = Requests(engine, card.vocab_size, limit), card
            gc.collect()
            gc.freeze()  # what stays for good need not be looked at by each collection
        except BaseException as error:  # noqa: BLE001  handed to the main thread
            self._load_error = error

    def _answer_while_loading(self) -> None:
        for worker, message in self.mailbox.receive(IDLE_POLL_MS // 4):
            self._workers.add(worker)
            if isinstance(message, Hello):
                self.mailbox.send(worker, Loading(self._phase))
            elif isinstance(message, Generate):
                failed = Failed(message.request_id, "unavailable", f"not ready: {self._phase}")
                self.mailbox.send(worker, Batch([failed]))

    def _announce(self, card: ModelCard) -> None:
        for worker in self._workers:
            self.mailbox.send(worker, Ready(card, self.incarnation))

    def _serve(self, requests: Requests, card: ModelCard) -> None:
        while not self.stopping:
            timeout_ms = 0 if requests.has_work else IDLE_POLL_MS
            outbox: dict[bytes, list[Event]] = defaultdict(list)
            for worker, message in self.mailbox.receive(timeout_ms):
                if isinstance(message, Hello):
                    self.mailbox.send(worker, Ready(card, self.incarnation))
                elif isinstance(message, Abort):
                    requests.abort(worker, message.request_id)
                else:
                    outbox[worker] += requests.submit(worker, message)
            for worker, event in requests.step():
                outbox[worker].append(event)
            for worker, events in outbox.items():
                if not self.mailbox.send(worker, Batch(events)):
                    logger.warning("a worker is gone; its requests are dropped")
                    requests.abort_all(worker)


def _explain(error: BaseException) -> int:
    """Say why loading failed; the exit code."""
    if isinstance(error, CannotServeError):
        sys.stderr.write(f"serve: {error}\n")
        return EXIT_CANNOT_SERVE
    logger.critical("loading the model failed", exc_info=error)
    return 1


def main(arguments: list[str]) -> int:
    """`python -m handler.runner.process '<RunnerConfig as JSON>'`."""
    config = msgspec.json.decode(arguments[0], type=RunnerConfig)
    logging_setup.configure(config.log_level, config.log_format, "runner")
    runner = Runner(config)
    signal.signal(signal.SIGTERM, runner.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is launch's to handle
    return runner.run()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    # The loader may still be at work in its thread, inside torch; an ordinary exit would take torch
    # away under it and end in an abort instead of this code.
    os._exit(exit_code)
