"""Draws tokens from filtered distributions: temperature, top_k, top_p, min_p, typical_p.

Filters look at a row's most likely tokens only, sorted; sorting a whole vocabulary is needed just
for rows whose filters reach beyond them. Definitions are those of transformers' logits warpers:
`top_p` keeps the smallest set of most likely tokens whose mass reaches p, `min_p` those at least
p times as likely as the best, `typical_p` those whose surprise is nearest to the entropy.

Must not know: sequences, penalties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from handler.runner.protocol import Sampling

NO_TOP_K = 1 << 40
"""More tokens than any vocabulary has; larger numbers mean the same."""

NUM_CANDIDATES = 256
"""Most likely tokens looked at first; nearly every filtered row is decided among them."""


def draw(scores: torch.Tensor, samplings: list[Sampling], uniforms: list[float]) -> list[int]:
    """One token per row of float32 `scores`, by inverse transform of the row's uniform number."""
    scores = scores / _column([s.temperature for s in samplings], scores)
    points = _column(uniforms, scores)
    tokens = [0] * len(samplings)
    groups: dict[Callable[..., torch.Tensor], list[int]] = {}
    for row, sampling in enumerate(samplings):
        groups.setdefault(_method(sampling), []).append(row)
    for method, rows in groups.items():
        part = scores if len(rows) == len(samplings) else scores[rows]
        picked = method(part, [samplings[r] for r in rows], points[rows])
        for row, token in zip(rows, picked.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _method(sampling: Sampling) -> Callable[..., torch.Tensor]:
    if sampling.typical_p < 1:
        return _draw_typical
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        return _draw_filtered
    return _draw_unfiltered


def _draw_unfiltered(
    scores: torch.Tensor,
    samplings: list[Sampling],  # noqa: ARG001  each method has the same signature
    points: torch.Tensor,
) -> torch.Tensor:
    return _invert(torch.softmax(scores, dim=-1), points)


def _draw_filtered(
    scores: torch.Tensor, samplings: list[Sampling], points: torch.Tensor
) -> torch.Tensor:
    """top_k, top_p, min_p among the best candidates; rows that reach further are sorted whole."""
    size = scores.shape[-1]
    num = min(size, max(NUM_CANDIDATES, 1 + max(s.top_k for s in samplings)))
    best, ids = scores.topk(num, dim=-1)
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    kept, decided = keep_sorted(best, total, samplings)
    tokens = _pick(best, ids, kept, points)
    open_rows = [r for r, done in enumerate(decided.tolist()) if not done and num < size]
    if open_rows:
        best, ids = scores[open_rows].sort(dim=-1, descending=True)
        kept, _ = keep_sorted(best, total[open_rows], [samplings[r] for r in open_rows])
        tokens[open_rows] = _pick(best, ids, kept, points[open_rows])
    return tokens


def keep_sorted(
    best: torch.Tensor, total: torch.Tensor, samplings: list[Sampling]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the sorted scores survive top_k, top_p and min_p, and which rows are decided.

    `best`: (rows, n), descending, temperature applied. `total`: (rows, 1), log of the sum of
    exp over the whole vocabulary. Decided: no token beyond the n given can survive.
    """
    num = best.shape[-1]
    wanted = [min(s.top_k or NO_TOP_K, NO_TOP_K) for s in samplings]
    top_k = torch.tensor(wanted, device=best.device)[:, None]
    limit = best.gather(-1, (top_k - 1).clamp(max=num - 1))
    # Ties with the k-th score survive, as in transformers.
    kept = (best >= limit) | (top_k > num)
    within = torch.where(top_k > num, total, _masked_logsumexp(best, kept))
    probs = torch.exp(best - within).masked_fill(~kept, 0.0)
    before = probs.cumsum(dim=-1) - probs
    top_p = _column([s.top_p for s in samplings], best)
    kept &= (before < top_p) | (top_p >= 1)
    min_p = _column([s.min_p for s in samplings], best)
    kept &= probs >= min_p * probs[:, :1]
    kept[:, 0] = True
    return kept, ~kept[:, -1]


def _draw_typical(
    scores: torch.Tensor, samplings: list[Sampling], points: torch.Tensor
) -> torch.Tensor:
    """typical_p after the other filters, over whole rows."""
    best, ids = scores.sort(dim=-1, descending=True)
    kept, _ = keep_sorted(best, torch.logsumexp(scores, dim=-1, keepdim=True), samplings)
    kept = keep_typical(best.masked_fill(~kept, float("-inf")), samplings)
    return _pick(best, ids, kept, points)


def keep_typical(scores: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Which scores survive typical_p: (rows, n) of bool. Filtered ones are -inf already."""
    logprobs = torch.log_softmax(scores, dim=-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).nan_to_num(0.0).sum(dim=-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    _, order = distance.sort(dim=-1)
    mass = probs.gather(-1, order).cumsum(dim=-1)
    typical_p = _column([s.typical_p for s in samplings], scores)
    # transformers keeps every token up to and including the one that reaches the mass.
    last = (mass < typical_p).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    threshold = distance.gather(-1, order).gather(-1, last)
    return (distance <= threshold) & (scores > float("-inf"))


def _pick(
    best: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, points: torch.Tensor
) -> torch.Tensor:
    """The token ids drawn among the kept scores."""
    probs = torch.softmax(best.masked_fill(~kept, float("-inf")), dim=-1)
    return ids.gather(-1, _invert(probs, points)[:, None])[:, 0]


def _invert(probs: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The index at which each row's running sum passes its point."""
    sums = probs.cumsum(dim=-1, dtype=torch.float64)
    # Scaled by the last sum, so that rounding can never leave the point beyond it.
    index = torch.searchsorted(sums, points.double() * sums[:, -1:], right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1)


def _masked_logsumexp(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(scores.masked_fill(~kept, float("-inf")), dim=-1, keepdim=True)


def _column(numbers: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=like.device)[:, None]
