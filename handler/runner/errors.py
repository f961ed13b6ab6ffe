"""The runner's own exceptions. Must not know: exit codes, HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handler.runner.protocol import FailureKind


class CannotServeError(Exception):
    """The model can never be served as configured; the message says why and what would help."""


class InvalidRequestError(Exception):
    """One request cannot run; the message carries the numbers.

    `kind` is `too_long`, `invalid` or `overloaded`.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
