"""Changes raw logits by what a sequence already holds: penalties and the logit bias.

`repetition_penalty` is transformers' (prompt and output; divides positive and multiplies negative
logits); `frequency_penalty`, `presence_penalty` and `logit_bias` are OpenAI's (over generated
tokens; subtracted, added).

Must not know: how a token is chosen afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from handler.runner.protocol import Sampling
    from handler.runner.sequence import Sequence


class _Counts:
    """What one sequence holds, brought up to date as it grows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.generated = torch.zeros(vocab_size, device=device)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.num_counted = 0

    def update(self, sequence: Sequence) -> None:
        new = torch.tensor(sequence.tokens[self.num_counted :], device=self.seen.device)
        self.seen[new] = True
        first = max(sequence.num_prompt - self.num_counted, 0)
        generated = new[first:]
        self.generated.index_add_(0, generated, torch.ones_like(generated, dtype=torch.float32))
        self.num_counted = len(sequence.tokens)


class Penalties:
    """Token counts of the sequences that need them."""

    def __init__(self) -> None:
        self._counts: dict[Sequence, _Counts] = {}

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        """Whether these parameters change any raw logit."""
        return (
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty != 0
            or sampling.presence_penalty != 0
            or bool(sampling.logit_bias)
        )

    def forget(self, sequence: Sequence) -> None:
        """Drop the counts of a sequence that ended."""
        self._counts.pop(sequence, None)

    def apply(self, scores: torch.Tensor, sequences: list[Sequence]) -> None:
        """Change float32 `scores` (len(sequences), vocabulary) in place."""
        rows = [r for r, s in enumerate(sequences) if s.sampling and self.wanted(s.sampling)]
        if not rows:
            return
        counts, repetition, frequency, presence = [], [], [], []
        for row in rows:
            sequence = sequences[row]
            if sequence not in self._counts:
                self._counts[sequence] = _Counts(scores.shape[-1], scores.device)
            self._counts[sequence].update(sequence)
            counts.append(self._counts[sequence])
            assert sequence.sampling is not None
            repetition.append([sequence.sampling.repetition_penalty])
            frequency.append([sequence.sampling.frequency_penalty])
            presence.append([sequence.sampling.presence_penalty])
        device = scores.device
        seen = torch.stack([c.seen for c in counts])
        generated = torch.stack([c.generated for c in counts])
        factor = torch.tensor(repetition, device=device)
        part = scores[rows]
        part = torch.where(seen, torch.where(part < 0, part * factor, part / factor), part)
        part -= generated * torch.tensor(frequency, device=device)
        part -= (generated > 0) * torch.tensor(presence, device=device)
        scores[rows] = part
        for row in rows:
            bias = sequences[row].sampling.logit_bias  # type: ignore[union-attr]
            if bias:
                ids = torch.tensor(list(bias), device=device)
                scores[row, ids] += torch.tensor(list(bias.values()), device=device)
