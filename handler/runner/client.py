"""The worker's end of the socket: submits sequences, hands back events, sees a runner die.

One DEALER socket per worker, made after the fork. A plain pyzmq socket waits on its own file
descriptor through gevent's hub: pyzmq's green socket allows one waiting reader and looks again
for a wake-up it missed only after seconds. The descriptor is edge-triggered, so everything that
touches the socket (a receive, a send) drains it until it is empty before anyone waits again.

A socket monitor tells at once when the runner's end closes, however it died. The socket is then
replaced, so that nothing queued for the old runner reaches the new one.

Must not know: HTTP, the handlers, text. It knows gevent and ZeroMQ and the protocol only.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import gevent
import gevent.event
import msgspec
import zmq
import zmq.utils.monitor

from handler.runner.protocol import (
    PROTOCOL_VERSION,
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
    Ready,
    ToRunner,
    decode_to_worker,
    encode,
)

log = logging.getLogger(__name__)

NOT_CONNECTED = "waiting for the runner"
ASK_AGAIN_S = 1.0
"""How often a runner that is not ready is asked again; it also says Ready unasked."""
RECONNECT_MS = 100


class RunnerUnavailableError(Exception):
    """The runner cannot take sequences now; the text says why."""


class GenerationClosedError(Exception):
    """The generation was closed (its client left) while someone was consuming it."""


class Generation:
    """The merged events of the sequences of one call, as they arrive. Consumed once."""

    def __init__(self, client: "RunnerClient", num_sequences: int) -> None:
        self._client = client
        self._request_ids: list[str] = []
        self._unfinished = set(range(num_sequences))
        self._events: deque[tuple[int, Event]] = deque()
        self._changed = gevent.event.Event()
        self._closed = False

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        """Yield `(index of the sequence, event)` until every sequence has ended.

        Raises GenerationClosedError after `close`.
        """
        while True:
            while self._events:
                yield self._events.popleft()
            if self._closed:
                raise GenerationClosedError
            if not self._unfinished:
                return
            self._changed.clear()
            self._changed.wait()

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to consume (an event, the end); False on time-out."""
        if self._events or self._closed or not self._unfinished:
            return True
        return bool(self._changed.wait(timeout_s))

    def cancel(self, index: int) -> None:
        """Stop one sequence; it yields nothing more."""
        if index in self._unfinished:
            self._unfinished.discard(index)
            self._client._abort(self._request_ids[index])
        self._events = deque(item for item in self._events if item[0] != index)
        self._changed.set()

    def close(self) -> None:
        """Abort whatever has not ended, and end the iteration with GenerationClosedError."""
        if self._closed or not (self._unfinished or self._events):
            return
        self._closed = True
        self._events.clear()
        for index in sorted(self._unfinished):
            self._client._abort(self._request_ids[index])
        self._unfinished.clear()
        self._changed.set()

    def _deliver(self, index: int, event: Event) -> None:
        """Called by the client for each event of an unfinished sequence."""
        if isinstance(event, Finished | Failed):
            self._unfinished.discard(index)
        self._events.append((index, event))
        self._changed.set()


class RunnerClient:
    """One worker's connection to the runner. All methods belong to the thread of the hub."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._reader = gevent.Greenlet()
        self._watcher = gevent.Greenlet()
        self._asker = gevent.Greenlet()
        self._routes: dict[str, tuple[Generation, int]] = {}
        self._num_submitted = 0
        self._incarnation: str | None = None
        self._callbacks: list[Callable[[ModelCard], None]] = []
        self.connected = False
        """Whether a runner process holds the other end, ready or not."""
        self.card: ModelCard | None = None
        """The model, while the runner is ready to generate; else None."""
        self.phase = NOT_CONNECTED
        """What the runner is doing, for people."""

    def start(self) -> None:
        """Connect. Call once per process, after the fork; returns at once."""
        self._context = zmq.Context()
        self._open()
        self._asker = gevent.spawn(self._ask_until_ready)

    def stop(self) -> None:
        """Fail what is unfinished and close the sockets."""
        gevent.killall([self._asker, self._watcher])
        self._close()
        if self._context is not None:
            self._context.term()
            self._context = None

    def on_ready(self, callback: Callable[[ModelCard], None]) -> None:
        """Call `callback(card)` in a greenlet of its own each time a runner becomes ready."""
        self._callbacks.append(callback)
        if self.card is not None:
            gevent.spawn(callback, self.card)

    def submit(self, sequences: Sequence[Generate]) -> Generation:
        """Send the sequences to the runner, under request ids of our own.

        Raises RunnerUnavailableError when no runner is ready.
        """
        if self.card is None:
            raise RunnerUnavailableError(self.phase)
        generation = Generation(self, len(sequences))
        for index in range(len(sequences)):
            self._num_submitted += 1
            request_id = f"{self._num_submitted:x}"
            generation._request_ids.append(request_id)
            self._routes[request_id] = (generation, index)
        for request_id, sequence in zip(generation._request_ids, sequences, strict=True):
            self._send(msgspec.structs.replace(sequence, request_id=request_id))
        return generation

    @property
    def num_unfinished(self) -> int:
        """Sequences that have had no terminal event yet."""
        return len(self._routes)

    def fail_unfinished(self, message: str, kind: FailureKind = "unavailable") -> None:
        """End every unfinished sequence with `Failed`, and tell a living runner to drop it."""
        routes, self._routes = self._routes, {}
        for request_id, (generation, index) in routes.items():
            if self.connected:
                self._send(Abort(request_id))
            generation._deliver(index, Failed(request_id, kind, message))

    def _abort(self, request_id: str) -> None:
        if self._routes.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    # -- the socket ---------------------------------------------------------------------------

    def _open(self) -> None:
        assert self._context is not None
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._socket.connect(self._endpoint)
        self._reader = gevent.spawn(self._read, self._socket)
        self._watcher = gevent.spawn(self._watch, self._socket, self._monitor)

    def _close(self) -> None:
        self.connected = False
        self.card = None
        self.phase = NOT_CONNECTED
        self._incarnation = None
        self.fail_unfinished("The model's process stopped while it worked on this request.")
        self._reader.kill()  # it waits on the descriptor that is about to be closed
        socket, self._socket = self._socket, None
        monitor, self._monitor = self._monitor, None
        if socket is not None and monitor is not None:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    def _send(self, message: ToRunner) -> None:
        if self._socket is None:
            return
        self._socket.send(encode(message), zmq.NOBLOCK)
        self._drain(self._socket)

    def _read(self, socket: "zmq.Socket[bytes]") -> None:
        with _Readable(socket) as readable:
            while True:
                self._drain(socket)
                readable.wait()

    def _drain(self, socket: "zmq.Socket[bytes]") -> None:
        """Take every message that is there. Never waits and never lets another greenlet run."""
        while _has_input(socket):
            self._receive(socket.recv(zmq.NOBLOCK))

    def _watch(self, socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        """Follow the state of the connection; replace the socket when its other end is gone."""
        with _Readable(monitor) as readable:
            while self._follow(monitor):
                readable.wait()
        self._drain(socket)
        self._close()
        self._open()

    def _follow(self, monitor: "zmq.Socket[bytes]") -> bool:
        """Take the monitor's events; False once the connection is lost."""
        while _has_input(monitor):
            event = zmq.utils.monitor.recv_monitor_message(monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                return False
            self.connected = True
            self._send(Hello())
        return True

    def _ask_until_ready(self) -> None:
        while True:
            gevent.sleep(ASK_AGAIN_S)
            if self.connected and self.card is None:
                self._send(Hello())

    # -- what the runner says -------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        try:
            message = decode_to_worker(frame)
        except msgspec.DecodeError:
            log.exception("unreadable message from the runner")
            return
        if isinstance(message, Batch):
            for event in message.events:
                self._dispatch(event)
        elif message.version != PROTOCOL_VERSION:
            self.card = None
            self.phase = f"the runner speaks protocol {message.version}, not {PROTOCOL_VERSION}"
        elif isinstance(message, Loading):
            self.card = None
            self.phase = message.phase
        else:
            self._become_ready(message)

    def _dispatch(self, event: Event) -> None:
        route = self._routes.get(event.request_id)
        if route is None:
            return
        if isinstance(event, Finished | Failed):
            del self._routes[event.request_id]
        generation, index = route
        generation._deliver(index, event)

    def _become_ready(self, message: Ready) -> None:
        if message.incarnation == self._incarnation and self.card is not None:
            return
        if self._incarnation not in (None, message.incarnation):
            self.fail_unfinished("The model's process was restarted during this request.")
        self._incarnation = message.incarnation
        self.card = message.card
        self.phase = "ready"
        for callback in self._callbacks:
            gevent.spawn(callback, message.card)


def _has_input(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class _Readable:
    """Waits in the hub until a socket's file descriptor becomes readable."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._hub = gevent.get_hub()
        self._watcher = self._hub.loop.io(int(socket.getsockopt(zmq.FD)), 1)

    def __enter__(self) -> "_Readable":
        return self

    def __exit__(self, *_: object) -> None:
        self._watcher.close()

    def wait(self) -> None:
        self._hub.wait(self._watcher)
