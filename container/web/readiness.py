"""Whether the model can answer now, and why not. Must not know: HTTP, what the model is for."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from container.web import body, errors
from handler.runner.client import RunnerClient
from handler.runner.protocol import ModelCard

log = logging.getLogger(__name__)

_LONGEST_PHASE = 300


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
        """The served model. Raises ApiError 503."""
        reason = self.reason()
        if reason is not None:
            raise errors.not_ready(reason)
        return self._model

    def _phase(self) -> str:
        if self._client.connected:
            return self._client.phase
        try:
            written = self._phase_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            written = ""
        return written[:_LONGEST_PHASE] or self._client.phase

    def _prepare(self, card: ModelCard) -> None:
        """Build this worker's view of the model, beside everything else."""
        if self._built_for == card and self._fault is None:
            return
        fault, model = None, None
        try:
            model = body.in_thread(self._build_model, card)
        except Exception as error:
            log.exception("the tokenizer or the chat template cannot be used")
            fault = f"the tokenizer or the chat template cannot be used: {error}"
        self._built_for, self._model, self._fault = card, model, fault
