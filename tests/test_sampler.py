"""Choosing tokens: transformers' definitions, seeds that do not depend on the batch."""

from collections import Counter

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from handler.runner import filters
from handler.runner.protocol import Sampling
from handler.runner.sampler import Sampler, uniform
from handler.runner.sequence import Sequence

VOCABULARY = 600
"""More than `filters.NUM_CANDIDATES`, so that both ways of filtering are taken."""


def random_logits(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def sequence(sampling: Sampling, seed: int = 0, **own: object) -> Sequence:
    return Sequence("s", [1, 2, 3], 100, sampling=sampling, seed=seed, **own)  # type: ignore[arg-type]


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.2, 2.0),
    top_k=st.one_of(st.just(0), st.integers(1, VOCABULARY)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    typical_p=st.one_of(st.just(1.0), st.floats(0.1, 0.95)),
)


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """transformers' processors of the same parameters, in its own order."""
    found = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        found.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1:
        found.append(TypicalLogitsWarper(sampling.typical_p))
    return found


@settings(max_examples=40, deadline=None)
@given(samplings, st.integers(0, 1000), st.floats(0.5, 8.0))
def test_only_tokens_that_transformers_keeps_are_drawn_and_as_often(
    sampling: Sampling, seed: int, spread: float
) -> None:
    logits = random_logits(1, seed, spread)
    expected = torch.softmax(warpers(sampling)(torch.tensor([[1]]), logits.clone()), dim=-1)[0]
    points = [(i + 0.5) / 500 for i in range(500)]
    drawn = Counter(filters.draw(logits.expand(len(points), -1), [sampling] * len(points), points))
    for token, probability in enumerate(expected.tolist()):
        # Inverse transform of evenly spread points misses a token's share by one point at most.
        assert abs(drawn[token] / len(points) - probability) < 1.5 / len(points)


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    logits = random_logits(4)
    rows = [
        Sampling(temperature=0.0),
        Sampling(top_k=2),
        Sampling(top_p=0.3, temperature=0.7),
        Sampling(typical_p=0.4, repetition_penalty=1.3),
    ]
    together = Sampler(frozenset()).sample(logits, [sequence(s, seed=5) for s in rows])
    for row, sampling in enumerate(rows):
        alone = Sampler(frozenset()).sample(logits[row : row + 1], [sequence(sampling, seed=5)])
        assert alone[0].token_id == together[row].token_id


def test_the_same_seed_repeats_and_another_differs() -> None:
    logits = random_logits(1, spread=0.1)

    def tokens(seed: int) -> list[int]:
        item, found = sequence(Sampling(), seed=seed), []
        for _ in range(12):
            found.append(Sampler(frozenset()).sample(logits, [item])[0].token_id)
            item.tokens.append(found[-1])
        return found

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(-1) == tokens(-1)
    assert len(set(tokens(1))) > 6, "each position has a number of its own"


def test_uniform_numbers_are_spread_evenly() -> None:
    counts = Counter(
        int(uniform(seed, position) * 10) for seed in range(50) for position in range(200)
    )
    assert set(counts) == set(range(10))
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(1)
    item = sequence(Sampling(temperature=0, repetition_penalty=1.7))
    item.tokens.append(9)
    scores = logits.clone()
    Sampler(frozenset())._penalties.apply(scores, [item])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([item.tokens]), logits.clone())
    assert torch.allclose(scores, expected)


def test_frequency_and_presence_penalties_count_generated_tokens_only() -> None:
    logits = torch.zeros(1, VOCABULARY)
    item = sequence(Sampling(temperature=0, frequency_penalty=0.5, presence_penalty=0.25))
    sampler = Sampler(frozenset())
    sampler._penalties.apply(logits.clone(), [item])
    item.tokens += [9, 9, 4]
    scores = logits.clone()
    sampler._penalties.apply(scores, [item])
    assert scores[0, 9].item() == -1.25
    assert scores[0, 4].item() == -0.75
    assert scores[0, 1].item() == 0, "the prompt does not count"


def test_logit_bias_moves_the_choice() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    banned = Sampler(frozenset()).sample(
        logits, [sequence(Sampling(temperature=0, logit_bias={best: -100.0}))]
    )
    assert banned[0].token_id != best
    forced = Sampler(frozenset()).sample(
        logits, [sequence(Sampling(temperature=0, logit_bias={3: 100.0}))]
    )
    assert forced[0].token_id == 3


def test_no_end_before_min_tokens() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    item = sequence(Sampling(temperature=0), min_tokens=1)
    assert Sampler(frozenset({best})).sample(logits, [item])[0].token_id != best
    item.tokens.append(5)
    assert Sampler(frozenset({best})).sample(logits, [item])[0].token_id == best


def test_logprobs_are_those_of_the_raw_model() -> None:
    logits = random_logits(2)
    items = [
        sequence(
            Sampling(temperature=0, repetition_penalty=2.0, logit_bias={1: -50.0}), logprobs=3
        ),
        sequence(Sampling(temperature=0)),
    ]
    first, second = Sampler(frozenset()).sample(logits, items)
    raw = torch.log_softmax(logits[0], dim=-1)
    assert first.logprob is not None
    assert abs(first.logprob - raw[first.token_id].item()) < 1e-5
    assert [t for t, _ in first.top_logprobs] == raw.topk(3).indices.tolist()
    assert second.logprob is None


def test_logprobs_are_finite_whatever_the_logits() -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, 5] = 1.0
    item = sequence(Sampling(temperature=0), logprobs=20)
    sampled = Sampler(frozenset()).sample(logits, [item])[0]
    assert sampled.token_id == 5
    assert all(value >= -9999 for _, value in sampled.top_logprobs)
    assert msgspec.json.encode(sampled.top_logprobs)


def test_a_top_k_beyond_every_vocabulary_is_no_limit() -> None:
    logits = random_logits(1)
    chosen = [
        Sampler(frozenset()).sample(logits, [sequence(Sampling(top_k=k, top_p=0.9), seed=4)])
        for k in (0, VOCABULARY, 1 << 63, 1 << 200)
    ]
    assert len({sampled[0].token_id for sampled in chosen}) == 1


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(1)
    item = sequence(Sampling(temperature=1e-30))
    assert Sampler(frozenset()).sample(logits, [item])[0].token_id == int(logits.argmax())
