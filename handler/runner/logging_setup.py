"""Log lines of every process: one format as text, one as JSON, both on stderr.

Lives with the runner because the runner may import nothing from above; the other processes use it
through `container.logs`, which adds the id of the request that a line belongs to.

A record may carry `extra={"fields": {...}}`: further values, shown as `key=value` in text and as
members of the object in JSON. Must not know: requests, HTTP, the environment, torch.
"""

import json
import logging
import sys
import time
from typing import Any

_OUR_LOGGERS = ("container", "handler", "__main__")


def configure(level: str, fmt: str, process: str) -> None:
    """Send this process's log to stderr.

    `level` (debug, info, warning, error, critical) is that of our own loggers; libraries log
    warnings and worse. `fmt`: "text" or "json". `process` names the process in each line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if fmt == "json" else _Text(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    own_level = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(own_level, logging.WARNING))
    for name in _OUR_LOGGERS:
        logging.getLogger(name).setLevel(own_level)


def _members(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says besides its message: the request it belongs to, and the caller's fields."""
    members: dict[str, Any] = {}
    request_id = getattr(record, "request_id", None)
    if request_id:
        members["request_id"] = request_id
    members.update(getattr(record, "fields", {}))
    return members


def _timestamp(record: logging.LogRecord) -> str:
    """UTC with milliseconds, RFC 3339."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class _Text(logging.Formatter):
    """`2026-11-30T22:16:47.123Z INFO runner: message key=value`, a traceback below it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_timestamp(record)} {record.levelname} {self._process}: {record.getMessage()}"]
        parts += [f"{key}={value}" for key, value in _members(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    """One object on one line; `timestamp`, `level`, `process`, `logger`, `message` come first."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": _timestamp(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _members(record).items():
            line.setdefault(key, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
