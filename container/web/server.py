"""`python -m container.web.server JSON`: gunicorn with gevent workers around the application.

The master only binds the port and minds the workers; the application, and everything it imports,
is loaded in each worker after gevent has patched it. Exits 0 on SIGTERM once running requests have
ended. Must not know: what the routes do.
"""

import contextlib
import errno
import fcntl
import gc
import logging
import os
import resource
import socket
import sys
import termios
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gevent
import gunicorn.util
import msgspec
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from gunicorn.workers.ggevent import GeventWorker

from container import logs
from container.settings import Settings

if TYPE_CHECKING:
    from container.web.invocations import Handlers
    from handler.runner.client import RunnerClient

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the idle time of common load balancers (60 s), so that they close first."""
STUCK_S = 120
"""A worker whose event loop does not turn for this long is replaced."""
MAX_CONNECTIONS = 8192
"""Per worker. Refusals for load are answers (429), so connections are hardly limited."""
LINGER_S = 10.0
"""How long the rest of a refused body is read and dropped, so that the client sees the refusal."""
LAST_WORDS_S = 3.0
"""So long before the end of the grace period what still runs is told that it is over."""
_TICK_S = 0.2
_DRAIN_BYTES = 256 * 1024


class Start(msgspec.Struct, frozen=True):
    """The argument on the command line, as JSON."""

    settings: Settings
    endpoint: str
    """Address of the runner's socket."""
    run_dir: str


class GunicornLog(Logger):  # type: ignore[misc]
    """gunicorn's own messages in our log; the access log is ours."""

    def setup(self, cfg: Any) -> None:
        """Leave the handlers to the root logger."""
        super().setup(cfg)
        for handler in list(self.error_log.handlers):
            self.error_log.removeHandler(handler)
        self.error_log.propagate = True


class Worker(GeventWorker):  # type: ignore[misc]
    """gunicorn's gevent worker, which on SIGTERM also lets go of idle keep-alive connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections: dict[Any, Any] = {}
        """The connection that each handling greenlet serves."""
        self._idle: dict[Any, gevent.Timeout] = {}
        """Those greenlets that wait for a request."""

    def init_process(self) -> None:
        """Called by the base class after the fork; does not return before the worker ends."""
        gunicorn.util.write_error = _write_error
        super().init_process()

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve one connection until it is closed."""
        greenlet = gevent.getcurrent()
        self._connections[greenlet] = client
        try:
            super().handle(listener, client, addr)
        finally:
            del self._connections[greenlet]

    @contextlib.contextmanager
    def timeout_ctx(self) -> Any:
        """Around the wait for a request on a connection."""
        greenlet = gevent.getcurrent()
        with gevent.Timeout(self.cfg.keepalive, False) as timeout:
            self._idle[greenlet] = timeout
            try:
                yield
            finally:
                del self._idle[greenlet]

    def run(self) -> None:
        """Serve until told to stop, then until what runs has ended."""
        gevent.spawn(self._wind_down)
        super().run()

    def _wind_down(self) -> None:
        while self.alive:
            gevent.sleep(_TICK_S)
        last_words_at = time.monotonic() + self.cfg.graceful_timeout - LAST_WORDS_S
        while time.monotonic() < last_words_at:
            self._close_idle()
            gevent.sleep(_TICK_S)
        self.app.abandon()

    def _close_idle(self) -> None:
        """End the wait of connections on which nothing has arrived."""
        for greenlet, timeout in list(self._idle.items()):
            if not _num_waiting_bytes(self._connections[greenlet].fileno()):
                greenlet.kill(timeout, block=False)


class Server(BaseApplication):  # type: ignore[misc]
    """gunicorn, configured in code only: no file, no environment, no command line."""

    def __init__(self, start: Start, handlers: "Callable[[], Handlers] | None" = None) -> None:
        """`handlers`, for tests, is called in the worker to make the handlers.

        Raises OSError where the port cannot be bound.
        """
        self._start = start
        self._handlers = handlers
        self._client: RunnerClient | None = None
        self._listener = _bind(start.settings.host, start.settings.port)
        super().__init__()

    def load_config(self) -> None:
        """Called by the base class."""
        settings = self._start.settings
        for name, value in {
            "bind": f"fd://{self._listener.detach()}",
            "worker_class": Worker,
            "workers": settings.num_workers,
            "worker_connections": MAX_CONNECTIONS,
            "worker_tmp_dir": _heartbeat_dir(),
            "timeout": STUCK_S,
            "graceful_timeout": settings.graceful_timeout_s,
            "keepalive": KEEP_ALIVE_S,
            "preload_app": False,
            "control_socket_disable": True,
            "logger_class": GunicornLog,
            "loglevel": "debug" if settings.log_level == "debug" else "warning",
            "accesslog": None,
            "post_request": _drop_unread_body,
            "proc_name": "invocant",
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """The application, in a worker, after gevent has patched the standard library."""
        from container.web.app import create_app
        from handler.runner.client import RunnerClient

        self._client = RunnerClient(self._start.endpoint)
        self._client.start()
        handlers = None if self._handlers is None else self._handlers()
        app = create_app(self._start.settings, self._client, self._start.run_dir, handlers)
        gc.collect()
        gc.freeze()  # what is loaded now stays: no collection need look at it again
        return app

    def abandon(self) -> None:
        """Tell everyone still waiting that the server stops."""
        if self._client is not None:
            self._client.fail_unfinished("The server is shutting down.")


def _write_error(connection: Any, status: int, reason: str, message: str) -> None:
    """gunicorn's answer to what is no proper HTTP, in TGI's shape instead of HTML."""
    told = {"error": f"{reason}: {message[:200]}".rstrip(": "), "error_type": "http"}
    payload = msgspec.json.encode(told)
    head = (
        f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    connection.sendall(head.encode() + payload)


def _num_waiting_bytes(descriptor: int) -> int:
    """Bytes that have arrived on a connection and were not read."""
    answer = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(answer, sys.byteorder)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _notice_vanished_peers(listener)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _notice_vanished_peers(listener: socket.socket) -> None:
    """Probe silent peers, on every connection accepted here: one that lost its network says no
    goodbye, and its request would run to the end. Given up after about two minutes."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _heartbeat_dir() -> str | None:
    """Where workers show that they live: in memory, or a slow disk could make them look stuck."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _drop_unread_body(_worker: Any, req: Any, _environ: Any, _resp: Any) -> None:
    """After an answer: read what is left of the request's body, or give up the connection."""
    try:
        with gevent.Timeout(LINGER_S):
            while req.body.read(_DRAIN_BYTES):
                gevent.sleep(0)
    except gevent.Timeout:
        req.force_close()
    except Exception:  # noqa: BLE001 - however reading broke, the connection cannot be used again
        req.force_close()


def _allow_many_files() -> None:
    """Every connection is a file; the usual soft limit of 1024 is for programs that use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _cannot_listen(settings: Settings, error: OSError) -> str:
    place = f"{settings.host} port {settings.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{place} is already in use; choose another with --port"
    if error.errno == errno.EACCES:
        return f"no permission to listen on {place}; choose a --port above 1023"
    return f"cannot listen on {place}: {error.strerror or error}"


def main(argument: str, handlers: "Callable[[], Handlers] | None" = None) -> None:
    """Serve until stopped. Leaves by SystemExit: 0 after SIGTERM, 1 where the port is taken."""
    start = msgspec.json.decode(argument, type=Start)
    logs.configure(start.settings.log_level, start.settings.log_format, "web")
    _allow_many_files()
    try:
        server = Server(start, handlers)
    except OSError as error:
        sys.stderr.write(f"serve: {_cannot_listen(start.settings, error)}\n")
        sys.exit(1)
    server.run()


if __name__ == "__main__":
    main(sys.argv[1])
