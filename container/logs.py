"""The log of launch and of the web workers: the runner's formats, plus the id of the request.

The web layer sets `request_id` when a request arrives; every line logged while it is served (by the
same greenlet) then carries it. Must not know: HTTP, where the id comes from.
"""

import logging
from contextvars import ContextVar

from handler.runner import logging_setup

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def configure(level: str, fmt: str, process: str) -> None:
    """Send this process's log to stderr; see `handler.runner.logging_setup.configure`."""
    logging_setup.configure(level, fmt, process)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_with_request_id)


def _with_request_id(record: logging.LogRecord) -> bool:
    """Note the current request on the record, unless the caller named one."""
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True
