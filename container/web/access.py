"""What is known of one HTTP request: its id, its times, what came of it; one log line at its end.

Must not know: how requests are answered, text of prompts or answers (they are never logged).
"""

import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flask import Request

from container import logs
from handler.contract import Api, Usage

log = logging.getLogger(__name__)

_CLEAN_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_LEFT = 499
"""The status logged where nobody was there to be told one (nginx's number)."""


@dataclass
class Record:
    """One request, from its arrival to the end of its answer."""

    request_id: str
    method: str
    path: str
    inference_id: str | None
    """SageMaker's name for the request, where the caller gave one."""
    route: str = ""
    api: Api = "tgi"
    status: int = 0
    is_quiet: bool = False
    """Health checks are logged at debug: they come every few seconds for ever."""
    stream: bool = False
    client_left: bool = False
    error: str | None = None
    usage: Usage | None = None
    started_s: float = field(default_factory=time.monotonic)
    validation_s: float = 0.0
    first_byte_s: float | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called once, after the last byte, whatever happened."""

    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.started_s

    def finish(self) -> None:
        """Free what the request held, then write its line."""
        for action in self.at_end:
            action()
        self.at_end.clear()
        level = logging.DEBUG if self.is_quiet else logging.INFO
        status = CLIENT_LEFT if self.client_left else self.status
        if log.isEnabledFor(level):
            log.log(
                level,
                "%s %s %d",
                self.method,
                self.path,
                status,
                extra={"request_id": self.request_id, "fields": self._fields(status)},
            )

    def _fields(self, status: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "route": self.route,
            "status": status,
            "stream": self.stream,
            "total_s": round(self.age_s(), 4),
        }
        if self.first_byte_s is not None:
            fields["first_byte_s"] = round(self.first_byte_s, 4)
        if self.usage is not None:
            fields |= {
                "prompt_tokens": self.usage.prompt_tokens,
                "generated_tokens": self.usage.completion_tokens,
                "finish_reason": ",".join(self.usage.finish_reasons),
                "validation_s": round(self.validation_s, 4),
                "queue_s": round(self.usage.queue_s, 4),
                "inference_s": round(self.usage.inference_s, 4),
            }
        if self.inference_id:
            fields["inference_id"] = self.inference_id
        if self.error:
            fields["error"] = self.error
        return fields


def begin(request: Request) -> Record:
    """The record of a request that just arrived; its id is the client's, or a new one."""
    given = request.headers.get("X-Request-Id", "")
    request_id = given if _CLEAN_ID.fullmatch(given) else uuid.uuid4().hex
    logs.request_id.set(request_id)
    inference_id = request.headers.get("X-Amzn-SageMaker-Inference-Id")
    return Record(
        request_id=request_id,
        method=request.method,
        path=request.path[:200],
        inference_id=inference_id[:128] if inference_id else None,
        route="" if request.url_rule is None else request.url_rule.rule,
    )
