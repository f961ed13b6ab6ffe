"""TGI's view of a sequence: one event per token, and the text with its stop string.

Must not know: requests, the frame of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from handler.runner.protocol import Finished, Tokens
from handler.served_model import ServedModel
from handler.stop_strings import StopMatcher, StopStrings
from handler.transcript import EndReason

FINISH_REASONS: dict[EndReason, str] = {
    "length": "length",
    "eos": "eos_token",
    "stop_token": "eos_token",
    "stop_string": "stop_sequence",
}

_json = msgspec.json.Encoder().encode


@dataclass
class TokenEvent:
    """One token as TGI shows it. `index` counts from 1."""

    index: int
    token_id: int
    text: str
    logprob: float | None
    special: bool
    top_tokens: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fields(self) -> dict[str, Any]:
        """TGI's token object."""
        return {
            "id": self.token_id,
            "text": self.text,
            "logprob": self.logprob,
            "special": self.special,
        }


class TokenReader:
    """Reads the events of one sequence into token events.

    A token that may be the last is held until the runner says so, because the last event carries
    more; all others are released at once.
    """

    def __init__(self, model: ServedModel, stops: StopStrings | None, max_tokens: int) -> None:
        self._vocabulary = model.vocabulary
        self._eos_ids = frozenset(model.card.eos_token_ids)
        self._max_tokens = max_tokens
        # Token texts and stop strings see special tokens, the text that is answered does not.
        self._shown = model.vocabulary.detokenizer(skip_special_tokens=False)
        self._answered = model.vocabulary.detokenizer()
        self._matcher = StopMatcher(stops, include=True) if stops else None
        self._texts: list[str] = []
        self._held: TokenEvent | None = None
        self._logprob_sum = 0.0
        self.num_tokens = 0
        self.reason: EndReason | None = None
        self.prompt_logprobs: Sequence[float | None] = ()

    @property
    def text(self) -> str:
        """All of the text so far, special tokens left out."""
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        """Over all tokens, the end token included."""
        return self._logprob_sum / max(self.num_tokens, 1)

    @property
    def finish_reason(self) -> str:
        """TGI's word for the end."""
        return FINISH_REASONS[self.reason or "length"]

    def take(self, event: Tokens) -> list[TokenEvent]:
        """The token events that these tokens release."""
        released: list[TokenEvent] = []
        for place, token_id in enumerate(event.token_ids):
            if self._held is not None:
                released.append(self._held)
                self._held = None
            token = self._token(event, place)
            if self.reason is None and (
                token_id in self._eos_ids or self.num_tokens >= self._max_tokens
            ):
                self._held = token
                continue
            released.append(token)
            if self.reason is not None:
                break
        return released

    def finish(self, event: Finished) -> list[TokenEvent]:
        """The last token event; none where the runner ended without a token that could be one."""
        rest = self._shown.flush()
        self._texts.append(self._answered.flush())
        self.reason = event.reason
        if self._held is None:
            return []
        self._held.text += rest
        return [self._held]

    def closing_event(self) -> TokenEvent:
        """Carries the end of a stream whose last token went out as an ordinary event."""
        return TokenEvent(self.num_tokens, 0, "", None, True)

    def _token(self, event: Tokens, place: int) -> TokenEvent:
        token_id = event.token_ids[place]
        self.num_tokens += 1
        logprob = event.logprobs[place] if event.logprobs else None
        self._logprob_sum += logprob or 0.0
        ends = token_id in self._eos_ids
        shown = self._shown.push(token_id)
        # An end token is none of the answer, whether the tokenizer calls it special or not.
        answered = "" if ends else self._answered.push(token_id)
        if self._matcher is not None:
            kept = self._matcher.push(shown)
            if self._matcher.matched:
                self.reason = "stop_string"
                # What follows the stop string in the same token is no part of the answer.
                answered = answered[: max(len(answered) - (len(shown) - len(kept)), 0)]
                shown = kept
        self._texts.append(answered)
        top = event.top_logprobs[place] if event.top_logprobs else []
        special = ends or token_id in self._vocabulary.special_token_ids
        return TokenEvent(self.num_tokens, token_id, shown, logprob, special, self._top_tokens(top))

    def _top_tokens(self, top: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        special_ids = self._vocabulary.special_token_ids
        return [
            {
                "id": token_id,
                "text": self._vocabulary.token_text(token_id),
                "logprob": logprob,
                "special": token_id in special_ids,
            }
            for token_id, logprob in top
        ]


def event_json(
    token: TokenEvent, text: str | None, details: dict[str, Any] | None, *, shows_top: bool
) -> bytes:
    """The event of one token; `text` and `details` belong to the last one only."""
    top = b',"top_tokens":' + _json(token.top_tokens) if shows_top else b""
    return b'{"index":%d,"token":%b%b,"generated_text":%b,"details":%b}' % (
        token.index,
        _json(token.fields),
        top,
        b"null" if text is None else _json(text),
        b"null" if details is None else _json(details),
    )
