"""Whether the model can answer now, and why not. Must not know: HTTP, what the model is for."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent.event

from container.web import body, errors
from handler.runner.client import NOT_CONNECTED, RunnerClient
from handler.runner.protocol import ModelCard

log = logging.getLogger(__name__)

_LONGEST_PHASE = 300
PATIENCE_S = 1.0
"""A request waits this long for the model before it is refused: workers become ready one after the
other, and some clients repeat a request that got 503 at once, hundreds of times a second."""


class Readiness:
    """Ready: a runner that can generate, and this worker's own view of its model."""

    def __init__(
        self, client: RunnerClient, run_dir: Path, build_model: Callable[[ModelCard], Any]
    ) -> None:
        """`run_dir/phase` tells what goes on while no runner is connected."""
        self._client = client
        self._phase_file = run_dir / "phase"
        self._build_model = build_model
        self._built_for: ModelCard | None = None
        self._model: Any = None
        self._fault: str | None = None
        self._prepared = gevent.event.Event()
        client.on_ready(self._prepare)

    @property
    def card(self) -> ModelCard | None:
        """The model that runs now."""
        return self._client.card

    def reason(self) -> str | None:
        """Why the model cannot answer now; None when it can."""
        if self._client.card is None:
            return self._phase()
        if self._built_for == self._client.card:
            return self._fault
        return "preparing the tokenizer"

    def require_model(self) -> Any:
        """The served model, waiting a moment for it. Raises ApiError 503."""
        deadline = time.monotonic() + PATIENCE_S
        while (reason := self.reason()) is not None:
            self._prepared.clear()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or reason == self._fault:
                raise errors.not_ready(reason)
            self._prepared.wait(left_s)
        return self._model

    def _phase(self) -> str:
        if self._client.phase != NOT_CONNECTED:
            return self._client.phase
        try:
            written = self._phase_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            written = ""
        return written[:_LONGEST_PHASE] or self._client.phase

    def _prepare(self, card: ModelCard) -> None:
        """Build this worker's view of the model, beside everything else."""
        if self._built_for != card or self._fault is not None:
            self._build(card)
        self._prepared.set()

    def _build(self, card: ModelCard) -> None:
        fault, model = None, None
        try:
            model = body.in_thread(self._build_model, card)
        except Exception as error:
            log.exception("the tokenizer or the chat template cannot be used")
            fault = f"the tokenizer or the chat template cannot be used: {error}"
        self._built_for, self._model, self._fault = card, model, fault
