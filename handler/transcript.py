"""What one sequence has said so far: its tokens as text, ended by stop strings or by the runner.

Must not know: OpenAI, TGI, JSON.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from handler.contract import Api, EventSource, Usage
from handler.failures import failure
from handler.runner.protocol import Failed, Finished, FinishReason, Tokens
from handler.stop_strings import StopMatcher, StopStrings
from handler.text import Vocabulary

EndReason = FinishReason | Literal["stop_string"]
Piece = TypeVar("Piece", covariant=True)


class Reader(Protocol[Piece]):
    """Reads the events of one sequence into pieces of its API's making."""

    num_tokens: int
    reason: EndReason | None
    """Set once the sequence has ended, by a stop string or as the runner says."""
    prompt_logprobs: Sequence[float | None]

    def take(self, event: Tokens) -> Piece:
        """What these tokens release; sets `reason` where the text ends with a stop string."""
        ...

    def finish(self, event: Finished) -> Piece:
        """What was held back so far, which nothing can complete any more."""
        ...


@dataclass(frozen=True)
class TextOptions:
    """How a request wants the tokens of its sequences turned into text."""

    end_token_ids: frozenset[int]
    """Ids that end a sequence; they are no part of its text unless `include_stop`."""
    stops: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """No stop string is looked for in the text of fewer tokens."""
    silent: bool = False
    """No tokens were asked for: the one that the runner had to produce is dropped."""


@dataclass(frozen=True)
class TokenLogprob:
    """One token of the text with its log-probability and the most likely ones at its place."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]


class Transcript:
    """Reads the events of one sequence."""

    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        self._options = options
        self._detokenizer = vocabulary.detokenizer(options.skip_special_tokens)
        self._matcher = StopMatcher(options.stops, options.include_stop) if options.stops else None
        self.num_tokens = 0
        self._token_ids: list[int] = []
        self.reason: EndReason | None = None
        self.cached_tokens = 0
        self._logprob_sum = 0.0
        self.prompt_logprobs: Sequence[float | None] = ()
        self._logprobs: list[TokenLogprob] = []

    def take(self, event: Tokens) -> str:
        """The text that these tokens release; `reason` is set where it ends with a stop string."""
        text = ""
        if self._options.silent:
            return text
        for place, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            self._token_ids.append(token_id)
            ends = token_id in self._options.end_token_ids
            if event.logprobs:
                self._note_logprob(event, place, ends)
            if not ends or self._options.include_stop:
                text += self._match(self._detokenizer.push(token_id))
                if self.reason is not None:
                    break
        return text

    def finish(self, event: Finished) -> str:
        """The text held back so far, which nothing can complete any more."""
        text = self._match(self._detokenizer.flush())
        if self.reason is None:
            text += self._matcher.flush() if self._matcher else ""
            self.reason = event.reason
        self.cached_tokens = event.cached_tokens
        return text

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, the end token included: how likely the model found this sequence."""
        return self._logprob_sum / max(self.num_tokens, 1)

    def take_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens since the last call."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def take_token_ids(self) -> list[int]:
        """Those of all tokens since the last call, of an end token too."""
        taken, self._token_ids = self._token_ids, []
        return taken

    def _match(self, text: str) -> str:
        if self._matcher is None or self.num_tokens < self._options.min_tokens:
            return text
        text = self._matcher.push(text)
        if self._matcher.matched:
            self.reason = "stop_string"
        return text

    def _note_logprob(self, event: Tokens, place: int, ends: bool) -> None:
        logprob = event.logprobs[place]
        self._logprob_sum += logprob
        if not ends or self._options.include_stop:
            top = event.top_logprobs[place] if event.top_logprobs else ()
            self._logprobs.append(TokenLogprob(event.token_ids[place], logprob, top))


def follow(
    api: Api, events: EventSource, readers: Sequence[Reader[Piece]], usage: Usage
) -> Iterator[tuple[int, Piece]]:
    """Hand the events to the readers: `(index, what is released)` per event, in order.

    A sequence that ends has its `reason` set when its last piece is yielded. Raises ApiError where
    one fails.
    """
    started = time.monotonic()
    for index, event in events:
        reader = readers[index]
        if isinstance(event, Tokens):
            before = reader.num_tokens
            piece = reader.take(event)
            usage.completion_tokens += reader.num_tokens - before
            if reader.reason is not None:
                events.cancel(index)
                # No event will say how long it took.
                usage.inference_s = max(usage.inference_s, time.monotonic() - started)
        elif isinstance(event, Finished):
            piece = reader.finish(event)
            usage.queue_s = max(usage.queue_s, event.queue_s)
            usage.inference_s = max(usage.inference_s, event.inference_s)
        elif isinstance(event, Failed):
            raise failure(api, event)
        else:
            reader.prompt_logprobs = event.logprobs
            continue
        yield index, piece
