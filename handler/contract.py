"""What every handler offers the web layer, and what it is given: the seam between HTTP and meaning.

A handler parses a body into a `Call`: the sequences to generate, and how their events become a
JSON body or a stream of JSON payloads. The web layer submits the sequences, frames what comes
back (HTTP, SSE) and turns an `ApiError` into the error body of the call's API.

Must not know: Flask, gevent, the socket.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from handler.runner.protocol import Event, Generate

Api = Literal["openai", "tgi"]


class ApiError(Exception):
    """A request that cannot be served, with everything a client needs to mend it.

    `status`: HTTP status. `message`: one sentence that names the field and what it accepts.
    `param`: the offending field as the client wrote it (`messages[1].role`), where there is one.
    `code`: OpenAI's error code (`context_length_exceeded`, `model_not_found`, …) or None.
    `kind`: TGI's error_type (`validation`, `template_error`, `overloaded`, `generation`, …).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "validation",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind


class EventSource(Protocol):
    """The merged events of a call's sequences, as they arrive."""

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        """Yield `(index of the sequence in Call.sequences, event)` until every one has ended."""
        ...

    def cancel(self, index: int) -> None:
        """Stop one sequence (its stop string was found); it yields nothing more."""
        ...


@dataclass
class Usage:
    """Counted while a call's events are consumed; read by the log line, metrics and headers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_characters: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queue_s: float = 0.0
    inference_s: float = 0.0


class Call(Protocol):
    """One parsed request."""

    api: Api
    """Whose error shape the client understands."""
    stream: bool
    done_marker: bool
    """Whether the stream ends with `data: [DONE]`."""
    sequences: list[Generate]
    usage: Usage

    def collect(self, events: EventSource) -> Any:
        """Consume all events; the JSON-serialisable body of a plain answer. Raises ApiError."""
        ...

    def payloads(self, events: EventSource) -> Iterator[bytes]:
        """Consume the events; one JSON text per SSE event, without framing. Raises ApiError."""
        ...
