"""The engine over a real tiny model: batching, preemption, limits and aborts change no token."""

import pytest
import torch

from handler.runner.engine import Engine, EngineLimits
from handler.runner.errors import InvalidRequestError
from handler.runner.model import PagedModel
from handler.runner.protocol import Sampling
from handler.runner.sequence import Sequence
from tiny_models import FAMILIES, POSITIONS, make_model, make_paged_llama, make_prompts

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def paged() -> PagedModel:
    return PagedModel(make_paged_llama())


def make_engine(paged: PagedModel, *, eos: set[int] | None = None, **own: int) -> Engine:
    limits = {
        "max_total_tokens": POSITIONS,
        "max_input_tokens": POSITIONS - 1,
        "max_batch_size": 8,
        "max_prefill_tokens": 32,
        "num_pages": 64,
    }
    return Engine(paged, frozenset(eos or ()), EngineLimits(**{**limits, **own}))


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    return [s.tokens[s.num_prompt :] for s in sequences]


def greedy(prompt: list[int], **own: object) -> Sequence:
    return Sequence("s", list(prompt), NEW_TOKENS, **own)  # type: ignore[arg-type]


def test_each_sequence_alone_equals_itself_in_the_batch(paged: PagedModel) -> None:
    prompts = make_prompts([5, 33, 1, 60, 12])
    together = run(make_engine(paged), [greedy(p) for p in prompts])
    alone = [run(make_engine(paged), [greedy(p)])[0] for p in prompts]
    assert together == alone


def test_contexts_of_very_different_lengths_share_a_step(paged: PagedModel) -> None:
    # Short, twice as long and far longer ones fall into groups of their own.
    long = Engine(paged, frozenset(), EngineLimits(2000, 1999, 8, 512, num_pages=400))
    prompts = make_prompts([700, 3, 280, 1500, 40, 300])
    together = run(long, [greedy(p) for p in prompts])
    for prompt, tokens in zip(prompts, together, strict=True):
        alone = Engine(paged, frozenset(), EngineLimits(2000, 1999, 8, 512, num_pages=400))
        assert run(alone, [greedy(prompt)]) == [tokens]


def test_preemption_changes_no_token(paged: PagedModel) -> None:
    prompts = make_prompts([30, 31, 32, 33])
    roomy = run(make_engine(paged), [greedy(p) for p in prompts])
    engine = make_engine(paged, num_pages=8)
    tight = run(engine, [greedy(p) for p in prompts])
    assert engine.scheduler.num_preemptions > 0, "the memory was not tight"
    assert tight == roomy
    assert engine.pool.num_free == 8


def test_a_cached_prefix_changes_no_token(paged: PagedModel) -> None:
    prompt = make_prompts([50])[0]
    engine = make_engine(paged)
    first = run(engine, [greedy(prompt)])
    second = greedy(prompt)
    assert run(engine, [second]) == first
    assert second.num_cached == 48


def test_a_seeded_sequence_is_the_same_alone_and_in_the_batch(paged: PagedModel) -> None:
    prompts = make_prompts([9, 20, 41])

    def seeded(index: int) -> Sequence:
        return greedy(prompts[index], sampling=Sampling(temperature=0.9, top_p=0.9), seed=index)

    together = run(make_engine(paged), [seeded(i) for i in range(3)])
    assert together == [run(make_engine(paged), [seeded(i)])[0] for i in range(3)]


def test_each_end_has_its_reason(paged: PagedModel) -> None:
    prompt = make_prompts([9])[0]
    tokens = run(make_engine(paged), [greedy(prompt)])[0]
    third = tokens[2]
    assert third not in tokens[:2], "choose another prompt"
    by_eos, by_stop, at_limit, over = (
        greedy(prompt),
        greedy(prompt, stop_token_ids=frozenset({third})),
        greedy(prompt),
        greedy(prompt, ignore_eos=True),
    )
    at_limit.max_new_tokens = 3
    assert run(make_engine(paged, eos={third}), [by_eos]) == [tokens[:3]]
    assert by_eos.finish_reason == "eos"
    assert run(make_engine(paged), [by_stop]) == [tokens[:3]]
    assert by_stop.finish_reason == "stop_token"
    run(make_engine(paged, eos={third}), [at_limit, over])
    assert at_limit.finish_reason == "eos", "an end token at the very limit is still the end"
    assert over.finish_reason == "length"
    assert over.num_generated == NEW_TOKENS


def test_what_can_never_fit_is_refused_with_the_numbers(paged: PagedModel) -> None:
    engine = make_engine(paged, max_total_tokens=40, max_input_tokens=30)
    with pytest.raises(InvalidRequestError, match=r"31 tokens.*at most 30"):
        engine.add(greedy([3] * 31))
    with pytest.raises(InvalidRequestError, match=r"30 tokens and 20 new ones.*at most 40"):
        engine.add(greedy([3] * 30))
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add(greedy([]))
    assert not engine.has_work


def test_removing_a_running_sequence_frees_it_and_leaves_the_others(paged: PagedModel) -> None:
    prompts = make_prompts([9, 20])
    expected = run(make_engine(paged), [greedy(prompts[1])])
    engine = make_engine(paged)
    gone, stays = greedy(prompts[0]), greedy(prompts[1])
    engine.add(gone)
    engine.add(stays)
    engine.step()
    engine.remove(gone)
    while engine.has_work:
        engine.step()
    assert stays.tokens[stays.num_prompt :] == expected[0]
    assert engine.pool.num_free == 64


def test_prompt_logprobs_are_the_models_own(paged: PagedModel) -> None:
    prompt = make_prompts([45])[0]  # more than one chunk
    engine = make_engine(paged)
    engine.add(greedy(prompt, wants_prompt_logprobs=True))
    found: list[float | None] = []
    while engine.has_work:
        for item in engine.step():
            found += item.prompt_logprobs
    reference = make_model(FAMILIES["llama"]())
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0]
    raw = torch.log_softmax(logits[:-1], dim=-1)
    expected = raw.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert found[0] is None
    assert found[1:] == pytest.approx(expected, abs=1e-4)
