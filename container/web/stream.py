"""Server-sent events: a call's payloads framed, with what belongs before, between and after them.

The status is sent only when the runner has answered: a request that is refused gets its real
status. After the first byte a failure is one more event. Payloads that are ready together leave
in one write. Must not know: what the payloads say, routes.
"""

from collections.abc import Iterator

import gevent
import gevent.event
import msgspec
from flask import Response

from container.web import errors
from container.web.access import Record
from container.web.hang_up import HangUpWatch
from handler.contract import Call
from handler.runner.client import Generation, GenerationClosedError

SILENCE_S = 15.0
"""After this long without an event a comment is sent, so that nothing between gives up."""
KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One streamed answer. The call's events are consumed in a greenlet of their own, so that the
    writer can wait for them with a time limit and take all that are ready at once."""

    def __init__(self, call: Call, generation: Generation, record: Record) -> None:
        self._call = call
        self._generation = generation
        self._record = record
        self._ready: list[bytes] = []
        self._error: Exception | None = None
        self._is_done = False
        self._is_written = False
        self._changed = gevent.event.Event()
        self._watch: HangUpWatch | None = None

    def open(self, connection: object) -> Response:
        """Wait for the runner's first word, then make the response.

        Raises what the call raises before anything was sent. After `SILENCE_S` without a word the
        stream is opened all the same.
        """
        self._record.at_end.append(self.close)
        self._watch = HangUpWatch(connection, self._client_left)
        heard = self._generation.wait(SILENCE_S)
        gevent.spawn(self._feed)
        if heard:
            # The feed now runs until it has to wait, so that a refusal is seen before any payload.
            self._changed.wait(SILENCE_S)
            if self._error is not None:
                raise self._error
        return Response(self._frames(), mimetype="text/event-stream", headers=HEADERS)

    def close(self) -> None:
        """Abort what still runs. Called after the last byte, or when the client is gone."""
        if self._watch is not None:
            self._watch.stop()
        if not self._is_written and self._record.error is None:
            self._record.client_left = True  # a write failed before the watch saw it
        self._generation.close()

    def _client_left(self) -> None:
        self._record.client_left = True
        self._generation.close()

    def _feed(self) -> None:
        try:
            for payload in self._call.payloads(self._generation):
                self._ready.append(b"data: " + payload + b"\n\n")
                self._changed.set()
        except GenerationClosedError:
            self._record.client_left = True
        except Exception as error:  # noqa: BLE001 - whatever it is becomes the stream's last event
            self._error = error
        finally:
            self._generation.close()
            self._is_done = True
            self._changed.set()

    def _frames(self) -> Iterator[bytes]:
        while True:
            if not self._changed.wait(SILENCE_S):
                yield KEEP_ALIVE
                continue
            self._changed.clear()
            ready, self._ready = self._ready, []
            is_done = self._is_done
            if is_done:
                ready += self._last()
            if ready:
                if self._record.first_byte_s is None:
                    self._record.first_byte_s = self._record.age_s()
                yield b"".join(ready)
            if is_done:
                self._is_written = True
                return

    def _last(self) -> list[bytes]:
        if self._record.client_left:
            return []
        last: list[bytes] = []
        if self._error is not None:
            error = errors.as_api_error(self._error, self._record.request_id)
            self._record.error = error.message
            payload = msgspec.json.encode(errors.body(error, self._call.api))
            last.append(b"data: " + payload + b"\n\n")
        if self._call.done_marker:
            last.append(DONE)
        return last
