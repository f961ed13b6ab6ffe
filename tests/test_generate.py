"""TGI's generate: its wire, field by field, streaming and not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler import generate
from handler.contract import ApiError
from handler.runner.protocol import Failed, Finished, FinishReason, Tokens
from handler.served_model import ServedModel
from handler_support import (
    EOS,
    SPECIAL,
    FakeEvents,
    byte_level_tokenizer,
    make_model,
    play,
    sentencepiece_tokenizer,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer(adds_bos=True))


def encoded(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False).ids)


def parse(
    model: ServedModel,
    *,
    inputs: str = "hi",
    compat: bool = False,
    stream: bool | None = None,
    **parameters: Any,
) -> generate.GenerateCall:
    body = {"inputs": inputs, "parameters": parameters}
    return generate.parse(body, model, compat=compat, stream=stream)


def answer(
    model: ServedModel, ids: Sequence[int], reason: FinishReason = "eos", **options: Any
) -> Any:
    call = parse(model, **options)
    scripts = [ids] * len(call.sequences)
    return call.collect(play(model.tokenizer, call.sequences, scripts, reason=reason))


def stream(
    model: ServedModel, ids: Sequence[int], reason: FinishReason = "eos", **options: Any
) -> list[dict[str, Any]]:
    call = parse(model, stream=True, **options)
    assert call.stream
    assert not call.done_marker
    events = play(model.tokenizer, call.sequences, [ids], reason=reason)
    return [json.loads(payload) for payload in call.payloads(events)]


def test_plain_answer(model: ServedModel) -> None:
    ids = [*encoded(model, " there"), EOS]
    assert answer(model, ids) == {"generated_text": " there"}
    assert answer(model, ids, return_full_text=True) == {"generated_text": "hi there"}


def test_the_compat_form_is_a_list_of_one_with_the_prompt(model: ServedModel) -> None:
    ids = [*encoded(model, " there"), EOS]
    assert answer(model, ids, compat=True) == [{"generated_text": "hi there"}]
    assert answer(model, ids, compat=True, return_full_text=False) == [{"generated_text": " there"}]


def test_details(model: ServedModel) -> None:
    ids = [*encoded(model, "aé"), EOS]
    details = answer(model, ids, details=True)["details"]
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == 4
    assert details["seed"] is None
    assert details["prefill"] == []
    assert [(t["text"], t["special"]) for t in details["tokens"]] == [
        ("a", False),
        ("", False),
        ("é", False),
        ("<|im_end|>", True),
    ]
    assert [t["id"] for t in details["tokens"]] == ids
    assert {t["logprob"] for t in details["tokens"]} == {-0.1}
    assert "top_tokens" not in details
    assert "best_of_sequences" not in details


def test_prefill_and_top_tokens(model: ServedModel) -> None:
    details = answer(
        model, encoded(model, "a"), "length", decoder_input_details=True, top_n_tokens=2
    )["details"]
    assert [(t["text"], t["logprob"]) for t in details["prefill"]] == [
        ("<s>", None),
        ("h", -0.5),
        ("i", -0.5),
    ]
    assert details["finish_reason"] == "length"
    assert len(details["top_tokens"]) == 1
    assert [set(top) for top in details["top_tokens"][0]] == [
        {"id", "text", "logprob", "special"}
    ] * 2


def test_stream_events(model: ServedModel) -> None:
    events = stream(model, [*encoded(model, "ab"), EOS], details=True)
    assert [event["index"] for event in events] == [1, 2, 3]
    assert [event["token"]["text"] for event in events] == ["a", "b", "<|im_end|>"]
    assert [event["token"]["special"] for event in events] == [False, False, True]
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:2])
    assert events[-1]["generated_text"] == "ab"
    assert events[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 3,
        "seed": None,
        "input_length": 3,
    }
    assert list(events[0]) == ["index", "token", "generated_text", "details"]
    assert stream(model, [EOS])[-1]["details"] is None
    assert stream(model, [EOS], compat=True)[-1]["generated_text"] == "hi"


def test_an_end_token_that_is_not_special_is_no_part_of_the_text(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer([" END"])
    end = tokenizer.token_to_id("ĠEND")
    model = make_model(tmp_path, tokenizer, eos_token_ids=[end])
    body = answer(model, [*encoded(model, "a"), end], details=True)
    assert body["generated_text"] == "a"
    assert body["details"]["tokens"][-1]["special"] is True


def test_stream_with_top_tokens(model: ServedModel) -> None:
    (event,) = stream(model, [EOS], top_n_tokens=1)
    assert event["top_tokens"][0]["special"] is True


def test_each_token_is_sent_as_soon_as_it_is_known_not_to_be_the_last(model: ServedModel) -> None:
    call = parse(model, stream=True, max_new_tokens=2)
    waiting: list[str] = []

    class Source(FakeEvents):
        def __iter__(self) -> Any:
            waiting.append("first")
            yield 0, Tokens("r", encoded(model, "a"), [-1.0])
            waiting.append("second")
            yield 0, Tokens("r", encoded(model, "b"), [-1.0])
            waiting.append("end")
            yield 0, Finished("r", "length")

    payloads = call.payloads(Source([]))
    assert json.loads(next(payloads))["token"]["text"] == "a"
    assert waiting == ["first"]
    last = json.loads(next(payloads))
    assert waiting == ["first", "second", "end"]
    assert (last["token"]["text"], last["generated_text"]) == ("b", "ab")


def test_a_runner_that_ends_early_still_ends_the_stream(model: ServedModel) -> None:
    events = stream(model, encoded(model, "a"), "length")
    assert [event["token"]["text"] for event in events] == ["a", ""]
    assert events[-1]["generated_text"] == "a"


def test_several_tokens_of_one_step(model: ServedModel) -> None:
    call = parse(model, stream=True)
    ids = [*encoded(model, "ab"), EOS]
    events = FakeEvents([(0, Tokens("r", ids, [-1.0] * 3)), (0, Finished("r", "eos"))])
    texts = [json.loads(payload)["token"]["text"] for payload in call.payloads(events)]
    assert texts == ["a", "b", "<|im_end|>"]


@pytest.mark.parametrize("name", ["stop", "stop_sequences"])
def test_stop_sequences_stay_in_the_text(model: ServedModel, name: str) -> None:
    ids = encoded(model, "one two three")
    body = answer(model, ids, details=True, **{name: ["two"]})
    assert body["generated_text"] == "one two"
    assert body["details"]["finish_reason"] == "stop_sequence"
    assert body["details"]["generated_tokens"] == 7
    events = stream(model, ids, details=True, **{name: ["two"]})
    assert events[-1]["generated_text"] == "one two"
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert "".join(event["token"]["text"] for event in events) == "one two"


def test_a_stop_sequence_that_ends_inside_a_token(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer([" twenty"])
    model = make_model(tmp_path, tokenizer)
    ids = [*encoded(model, "one"), tokenizer.token_to_id("Ġtwenty"), *encoded(model, "x")]
    events = stream(model, ids, stop=["twe"])
    assert events[-1]["generated_text"] == "one twe"
    assert events[-1]["token"]["text"] == " twe"


def test_a_special_token_can_be_a_stop_sequence(model: ServedModel) -> None:
    ids = [*encoded(model, "a"), SPECIAL.index("<|im_start|>"), *encoded(model, "b")]
    body = answer(model, ids, stop=["<|im_start|>"], details=True)
    assert body["generated_text"] == "a"
    assert body["details"]["finish_reason"] == "stop_sequence"


def test_best_of(model: ServedModel) -> None:
    call = parse(model, do_sample=True, best_of=2, details=True)
    assert len({sequence.sampling.seed for sequence in call.sequences}) == 2
    events = FakeEvents(
        [
            (0, Tokens("r", encoded(model, "a"), [-2.0])),
            (1, Tokens("r", encoded(model, "b"), [-1.0])),
            (0, Finished("r", "length")),
            (1, Finished("r", "length")),
        ]
    )
    body = call.collect(events)
    assert body["generated_text"] == "b"
    assert body["details"]["seed"] == call.sequences[1].sampling.seed
    (loser,) = body["details"]["best_of_sequences"]
    assert loser["generated_text"] == "a"
    for key in ("finish_reason", "generated_tokens", "seed", "prefill", "tokens"):
        assert key in loser


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0),
        ({"do_sample": False, "temperature": 1.0}, 0),
        ({"do_sample": True}, 1),
        ({"temperature": 0.8}, 0.8),
        ({"top_k": 5}, 1),
        ({"top_p": 0.9}, 1),
        ({"typical_p": 0.9}, 1),
        ({"top_p": 1.0, "typical_p": 1.0}, 0),
    ],
)
def test_what_makes_it_sample(
    model: ServedModel, parameters: dict[str, Any], temperature: float
) -> None:
    (sequence,) = parse(model, **parameters).sequences
    assert sequence.sampling.temperature == temperature
    assert (sequence.sampling.seed is None) == (temperature == 0)


def test_the_seed_is_told(model: ServedModel) -> None:
    ids = [*encoded(model, "a"), EOS]
    given_ = answer(model, ids, do_sample=True, seed=2**64 - 1, details=True)
    assert given_["details"]["seed"] == 2**64 - 1
    drawn = answer(model, ids, do_sample=True, details=True, stop=["a"])["details"]["seed"]
    assert 0 <= drawn < 2**53


def test_truncate_keeps_the_last_tokens(model: ServedModel) -> None:
    (sequence,) = parse(model, inputs="x" * 300 + "end", truncate=3).sequences
    assert sequence.prompt_ids == encoded(model, "end")
    (sequence,) = parse(model, inputs="x" * 10**6 + "end", truncate=3).sequences
    assert sequence.prompt_ids == encoded(model, "end")
    for value in (0, 256):
        with pytest.raises(ApiError, match=f"`truncate` must be .* than 255. Given: {value}"):
            parse(model, truncate=value)


def test_token_budget(model: ServedModel) -> None:
    assert parse(model).sequences[0].max_new_tokens == 253
    assert parse(model, max_new_tokens=253).sequences[0].max_new_tokens == 253
    sentence = (
        r"Input validation error: `inputs` tokens \+ `max_new_tokens` must be <= 256. "
        "Given: 3 `inputs` tokens and 254 `max_new_tokens`"
    )
    with pytest.raises(ApiError, match=sentence):
        parse(model, max_new_tokens=254)
    with pytest.raises(ApiError, match=r"less than 255 tokens.* Given: 301"):
        parse(model, inputs="a" * 300)
    with pytest.raises(ApiError, match=r"less than 255 tokens.* Given: 100000 ch"):
        parse(model, inputs="a" * 100_000)


def test_a_huge_budget_is_admitted_as_tgi_does_and_ends_with_the_context(tmp_path: Path) -> None:
    model = make_model(tmp_path, max_input_tokens=2047, max_total_tokens=2048)
    (sequence,) = parse(model, max_new_tokens=100_000).sequences
    assert sequence.max_new_tokens == 2046
    with pytest.raises(ApiError, match="must be <= 2048"):
        parse(model, inputs="a" * 1100, max_new_tokens=1000)


def test_text_that_is_none(model: ServedModel) -> None:
    with pytest.raises(ApiError) as caught:
        parse(model, inputs="a\ud800")
    assert caught.value.status == 422


@pytest.mark.parametrize(
    ("kind", "status", "error_type"),
    [
        ("invalid", 422, "validation"),
        ("too_long", 422, "validation"),
        ("overloaded", 429, "overloaded"),
        ("unavailable", 503, "unavailable"),
        ("internal", 424, "generation"),
    ],
)
def test_a_failed_sequence(model: ServedModel, kind: Any, status: int, error_type: str) -> None:
    call = parse(model)
    with pytest.raises(ApiError) as caught:
        call.collect(FakeEvents([(0, Failed("r", kind, "why"))]))
    assert (caught.value.status, caught.value.kind) == (status, error_type)


def test_a_character_cut_by_the_budget(model: ServedModel) -> None:
    ids = encoded(model, "a😀")[:3]
    options = {"max_new_tokens": 3, "details": True}
    body = answer(model, ids, "length", **options)
    assert body["generated_text"] == "a\ufffd"
    assert [t["text"] for t in body["details"]["tokens"]] == ["a", "", "\ufffd"]
    assert stream(model, ids, "length", **options)[-1]["generated_text"] == "a\ufffd"


def test_sentencepiece_spaces(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    model = make_model(tmp_path, tokenizer)
    ids = [tokenizer.token_to_id("▁hello"), tokenizer.token_to_id("▁hello"), EOS]
    events = stream(model, ids)
    assert [event["token"]["text"] for event in events[:2]] == ["hello", " hello"]
    assert events[-1]["generated_text"] == "hello hello"


IDS = st.lists(st.integers(0, 270), max_size=12)


@given(IDS, st.lists(st.text("ab<|", min_size=1, max_size=3), max_size=2))
def test_token_texts_spell_the_text(model: ServedModel, ids: list[int], stop: list[str]) -> None:
    script = [*(token_id for token_id in ids if token_id != EOS), EOS]
    options = {"stop": stop, "details": True}
    body = answer(model, script, **options)
    tokens = body["details"]["tokens"]
    events = stream(model, script, **options)
    assert events[-1]["generated_text"] == body["generated_text"]
    assert [event["token"] for event in events] == tokens
    if not any(token["special"] for token in tokens[:-1]):
        spelled = "".join(token["text"] for token in tokens if not token["special"])
        # A character that the end token leaves incomplete is shown with that token.
        assert spelled.rstrip("\ufffd") == body["generated_text"].rstrip("\ufffd")
