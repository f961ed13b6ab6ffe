"""Chooses each row's next token: all rows in one pass, each with its own parameters.

Order and definitions are those of transformers' logits processors: penalties and bias on the raw
logits, then temperature, top_k, top_p, min_p, typical_p. A row's choice depends on its own
logits, parameters, seed and position alone, never on what else is in the batch: its one random
number comes from its seed and position, not from a shared generator.

Must not know: scheduling, text, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from handler.runner import filters
from handler.runner.penalties import Penalties

if TYPE_CHECKING:
    from handler.runner.protocol import Sampling
    from handler.runner.sequence import Sequence

_MASK64 = (1 << 64) - 1

MIN_TEMPERATURE = 1e-5
"""Below it the division by the temperature could overflow; the draw is greedy there anyway."""

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry (OpenAI's reference uses the same number)."""


@dataclass(slots=True)
class Sampled:
    """One row's outcome."""

    token_id: int
    logprob: float | None = None
    """Under the raw model, before penalties and filters."""
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


class Sampler:
    """Keeps the token counts that penalties need; otherwise without state."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids
        self._penalties = Penalties()

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that ended."""
        self._penalties.forget(sequence)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """One token per row. `logits` is (len(sequences), vocabulary), of any float type."""
        if all(_is_plain(s) for s in sequences):
            return [Sampled(t) for t in logits.argmax(dim=-1).tolist()]
        scores = logits.to(torch.float32, copy=True)  # changed in place below
        self._penalties.apply(scores, sequences)
        self._hold_back_ends(scores, sequences)
        tokens = self._choose(scores, sequences)
        return _with_logprobs(logits, tokens, sequences)

    def _hold_back_ends(self, scores: torch.Tensor, sequences: list[Sequence]) -> None:
        """No end of sequence before `min_tokens`."""
        for row, sequence in enumerate(sequences):
            if sequence.num_generated < sequence.min_tokens:
                ends = list(self._eos | sequence.stop_token_ids)
                scores[row, ends] = float("-inf")

    def _choose(self, scores: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        tokens: list[int] = scores.argmax(dim=-1).tolist()
        drawn = [row for row, s in enumerate(sequences) if is_random(s.sampling)]
        if drawn:
            samplings = [sequences[row].sampling for row in drawn]
            uniforms = [
                uniform(sequences[row].seed or 0, sequences[row].num_generated) for row in drawn
            ]
            rows = scores if len(drawn) == len(sequences) else scores[drawn]
            picked = filters.draw(rows, [s for s in samplings if s is not None], uniforms)
            for row, token in zip(drawn, picked, strict=True):
                tokens[row] = token
        return tokens


def is_random(sampling: Sampling | None) -> bool:
    """Whether tokens are drawn; otherwise the most likely one is taken."""
    return sampling is not None and sampling.temperature >= MIN_TEMPERATURE


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a seed and a position (splitmix64 of both)."""
    x = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK64
    return float((x ^ (x >> 31)) >> 11) / float(1 << 53)


def _is_plain(sequence: Sequence) -> bool:
    """Greedy with nothing to change or report: the raw argmax is the answer."""
    sampling = sequence.sampling
    if sequence.logprobs is not None or sequence.num_generated < sequence.min_tokens:
        return False
    return sampling is None or not (is_random(sampling) or Penalties.wanted(sampling))


def _with_logprobs(
    logits: torch.Tensor, tokens: list[int], sequences: list[Sequence]
) -> list[Sampled]:
    """Attach the raw model's log-probabilities to the rows that ask for them."""
    sampled = [Sampled(token) for token in tokens]
    rows = [row for row, s in enumerate(sequences) if s.logprobs is not None]
    if not rows:
        return sampled
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
    most = max(sequences[row].logprobs or 0 for row in rows)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    top_values, top_ids = values.tolist(), ids.tolist()
    for index, row in enumerate(rows):
        item, count = sampled[row], sequences[row].logprobs or 0
        item.logprob = max(float(logprobs[index, item.token_id]), LOWEST_LOGPROB)
        item.top_logprobs = [
            (token, max(value, LOWEST_LOGPROB))
            for token, value in zip(top_ids[index][:count], top_values[index][:count], strict=True)
        ]
    return sampled
