"""Notices at once that the client of a running request has closed its connection.

Nobody reads from the connection while its request is answered, so an end of file would otherwise
show at the next write, or for a plain answer never. The kernel is asked for the state of the TCP
connection; no byte is read, so a pipelined request stays where it is.

Must not know: what is done about it.
"""

import socket
from collections.abc import Callable
from typing import Any

import gevent

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_ESTABLISHED = 1
_READ = 1
_POLL_S = 0.25


class HangUpWatch:
    """Calls `on_hang_up()` once, in a greenlet of its own, if the client closes before `stop`.

    `connection` is `environ["gunicorn.socket"]`; without one, or where the kernel cannot tell,
    nothing is watched.
    """

    def __init__(self, connection: Any, on_hang_up: Callable[[], None]) -> None:
        self._connection = connection
        self._on_hang_up = on_hang_up
        self._watcher: Any = None
        if connection is None or _TCP_INFO is None or self._state() is None:
            return
        self._watch(gevent.get_hub().loop.io(connection.fileno(), _READ))

    def stop(self) -> None:
        """Watch no longer."""
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None

    def _watch(self, watcher: Any) -> None:
        self._watcher = watcher
        watcher.start(self._look)

    def _look(self) -> None:
        """Runs in the hub: must not wait."""
        if self._state() == _ESTABLISHED:
            # Bytes of a next request lie there and would report for ever: look now and then.
            self.stop()
            self._watch(gevent.get_hub().loop.timer(_POLL_S, _POLL_S))
        else:
            self.stop()
            gevent.spawn(self._on_hang_up)

    def _state(self) -> int | None:
        """The kernel's TCP state; None when it cannot be asked."""
        assert _TCP_INFO is not None
        try:
            return int(self._connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0])
        except OSError:
            return None
