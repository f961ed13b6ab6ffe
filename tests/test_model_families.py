"""Each architecture gives, through pages and in a batch, the tokens that generate() gives alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, MambaConfig, PretrainedConfig, T5Config

from handler.runner import model as runner_model
from handler.runner.engine import Engine, EngineLimits
from handler.runner.errors import CannotServeError
from handler.runner.model import PagedModel
from handler.runner.sequence import Sequence
from tiny_models import FAMILIES, POSITIONS, VOCABULARY, WINDOW, make_model, make_prompts

# The longest exceeds the window, a page and one step's share of prompt tokens.
PROMPT_LENGTHS = [1, 3, WINDOW, 17, 40, 70]
NEW_TOKENS = 24
LIMITS = EngineLimits(
    max_total_tokens=POSITIONS,
    max_input_tokens=POSITIONS - 1,
    max_batch_size=8,
    max_prefill_tokens=32,
    num_pages=64,
)


def load(folder: Path) -> PagedModel:
    config = runner_model.load_config(str(folder), trust_remote_code=False)
    model = runner_model.load_model(str(folder), config, torch.float32, torch.device("cpu"))
    return PagedModel(model)


def run(
    paged: PagedModel, prompts: list[list[int]], limits: EngineLimits = LIMITS
) -> list[Sequence]:
    engine = Engine(paged, frozenset(), limits)
    sequences = [Sequence(str(i), list(p), NEW_TOKENS) for i, p in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    assert engine.pool.num_free == limits.num_pages, "pages leak"
    return sequences


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    reference = make_model(FAMILIES[family]())
    reference.save_pretrained(tmp_path)
    prompts = make_prompts(PROMPT_LENGTHS)
    sequences = run(load(tmp_path), prompts)
    outputs = set()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0].tolist()
        outputs.add(tuple(expected[len(prompt) :]))
        assert sequence.tokens == expected
    assert len(outputs) > 3, "the model repeats itself: this would prove nothing"


@pytest.mark.parametrize("fault", ["truncated", "missing", "other shape"])
def test_faulty_weights_are_refused_with_the_reason(fault: str, tmp_path: Path) -> None:
    make_model(FAMILIES["llama"]()).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    if fault == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        weights = load_file(path)
        head = weights.pop("lm_head.weight")
        if fault == "other shape":
            weights["lm_head.weight"] = head[:5].clone()
        save_file(weights, path, {"format": "pt"})
    with pytest.raises(CannotServeError) as refusal:
        load(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    if fault == "missing":
        assert "lm_head.weight" in str(refusal.value)


def config_of(kind: type[PretrainedConfig], **own: object) -> PretrainedConfig:
    return kind(vocab_size=VOCABULARY, **own)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config_of(BloomConfig, hidden_size=32, n_layer=2, n_head=4), id="bloom"),
        pytest.param(config_of(MambaConfig, hidden_size=32, num_hidden_layers=2), id="mamba"),
        pytest.param(
            config_of(T5Config, d_model=32, d_ff=32, num_layers=2, num_heads=4, d_kv=8), id="t5"
        ),
    ],
)
def test_families_that_cannot_be_paged_are_refused(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(CannotServeError) as refusal:
        load(tmp_path)
    assert repr(config.model_type) in str(refusal.value)
    assert "Llama" in str(refusal.value), "the refusal names what is supported"
