"""The scripted model plays what its scripts say, judged by transformers' own generate().

Must not know: the product.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import scripted_model as scripted


class Player:
    """A scripted model in transformers' hands."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)

    def play(self, prompt_ids: list[int], max_new_tokens: int = 64) -> tuple[list[int], str]:
        """The generated ids, and the text that follows the prompt's."""
        prompt = torch.tensor([prompt_ids])
        output = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens
        )[0].tolist()
        before = self.tokenizer.decode(prompt_ids, skip_special_tokens=True)
        after = self.tokenizer.decode(output, skip_special_tokens=True)
        assert after.startswith(before)
        return output[len(prompt_ids) :], after[len(before) :]

    def chat_ids(self, content: str) -> list[int]:
        messages = [{"role": "user", "content": content}]
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        ids: list[int] = rendered["input_ids"]
        return ids


@pytest.fixture(scope="module")
def byte_level(scripted_model: Path) -> Player:
    return Player(scripted_model)


@pytest.fixture(scope="module")
def metaspace(metaspace_model: Path) -> Player:
    return Player(metaspace_model)


@pytest.mark.parametrize("name", scripted.TEXTS)
def test_every_script_plays_over_chat(byte_level: Player, name: str) -> None:
    ids, text = byte_level.play(byte_level.chat_ids(scripted.trigger(name)))
    assert text == scripted.TEXTS[name]
    last = scripted.END_OF_MESSAGE if name == "eos_list" else scripted.END_OF_TURN
    assert ids[-1] == byte_level.tokenizer.convert_tokens_to_ids(last)


@pytest.mark.parametrize("name", [n for n in scripted.METASPACE_SCRIPTS if n != scripted.ENDLESS])
def test_every_metaspace_script_plays_over_chat(metaspace: Player, name: str) -> None:
    _, text = metaspace.play(metaspace.chat_ids(scripted.trigger(name)))
    assert text == scripted.TEXTS[name]


def test_a_raw_prompt_plays_by_its_last_token(byte_level: Player) -> None:
    prompt = byte_level.tokenizer("anything before it " + scripted.trigger("cjk"))["input_ids"]
    assert byte_level.play(prompt)[1] == scripted.TEXTS["cjk"]


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_the_loop_never_ends(kind: str, request: pytest.FixtureRequest) -> None:
    player: Player = request.getfixturevalue(kind)
    ids, text = player.play(player.chat_ids(scripted.trigger(scripted.ENDLESS)), 50)
    assert len(ids) == 50
    assert text == " la" * 50


def test_a_prompt_that_ends_in_la_goes_on_with_la(byte_level: Player) -> None:
    prompt = byte_level.tokenizer("tra la la")["input_ids"]
    assert byte_level.play(prompt, 3)[1] == " la la la"


def test_characters_are_spread_over_several_tokens(byte_level: Player, metaspace: Player) -> None:
    for player in (byte_level, metaspace):
        ids, _ = player.play(player.chat_ids(scripted.trigger("emoji")))
        alone = [player.tokenizer.decode([token]) for token in ids[1:5]]
        assert alone == ["\ufffd"] * 4


def test_only_the_bos_model_adds_bos_to_a_text(
    byte_level: Player, scripted_bos_model: Path
) -> None:
    adding = Player(scripted_bos_model)
    bos = adding.tokenizer.bos_token_id
    assert adding.tokenizer("hi")["input_ids"][0] == bos
    assert bos not in byte_level.tokenizer("hi")["input_ids"]
    # Over chat the template has written it; there must be one.
    assert adding.chat_ids("hi").count(bos) == 1


def test_logits_are_as_promised(byte_level: Player) -> None:
    prompt = torch.tensor([byte_level.chat_ids(scripted.trigger("json"))])
    with torch.no_grad():
        logits = byte_level.model(prompt).logits[0, -1]
    best = torch.topk(logits, 3).values
    expected = torch.tensor([scripted.LIKELY, scripted.RUNNER_UP, 0.0])
    torch.testing.assert_close(best, expected, atol=0.01, rtol=0)


def test_the_context_length_is_as_asked(tmp_path: Path) -> None:
    folder = scripted.build(tmp_path / "short", max_positions=96)
    assert Player(folder).model.config.max_position_embeddings == 96


def test_it_is_small(scripted_model: Path) -> None:
    assert sum(path.stat().st_size for path in scripted_model.iterdir()) < 2_500_000
