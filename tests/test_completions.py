"""Completion calls: prompts of every form, echo, log-probabilities, best_of, streams."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler import completions
from handler.contract import ApiError
from handler.runner.protocol import Finished, FinishReason, Tokens
from handler.served_model import ServedModel, ServingLimits
from handler_support import EOS, SPECIAL, FakeEvents, byte_level_tokenizer, make_model, play


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer(adds_bos=True))


def encoded(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False).ids)


def answer(
    model: ServedModel, texts: Sequence[str], reason: FinishReason = "eos", **fields: Any
) -> dict[str, Any]:
    call = completions.parse({"prompt": "hi", **fields}, model)
    scripts = [[*encoded(model, text), EOS] for text in texts]
    return call.collect(play(model.tokenizer, call.sequences, scripts, reason=reason))


def stream(model: ServedModel, texts: Sequence[str], **fields: Any) -> list[dict[str, Any]]:
    call = completions.parse({"prompt": "hi", "stream": True, **fields}, model)
    scripts = [[*encoded(model, text), EOS] for text in texts]
    events = play(model.tokenizer, call.sequences, scripts)
    return [json.loads(payload) for payload in call.payloads(events)]


def choices_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for choice in choices_of(chunks, index))


def test_plain_answer(model: ServedModel) -> None:
    body = answer(model, [" there"])
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": " there", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 7


def test_raw_prompts_get_the_tokenizers_begin_token(model: ServedModel) -> None:
    bos = SPECIAL.index("<s>")
    (sequence,) = completions.parse({"prompt": "hi"}, model).sequences
    assert sequence.prompt_ids == [bos, *encoded(model, "hi")]
    assert sequence.max_new_tokens == 16
    # A prompt that brings its own gets two, as with transformers.
    (sequence,) = completions.parse({"prompt": "<s>hi"}, model).sequences
    assert sequence.prompt_ids == [bos, bos, *encoded(model, "hi")]
    without = completions.parse({"prompt": "hi", "add_special_tokens": False}, model)
    assert without.sequences[0].prompt_ids == encoded(model, "hi")


def test_prompts_of_token_ids(model: ServedModel) -> None:
    call = completions.parse({"prompt": [[8, 9], [10]], "n": 2}, model)
    assert [sequence.prompt_ids for sequence in call.sequences] == [[8, 9], [8, 9], [10], [10]]
    with pytest.raises(ApiError) as caught:
        completions.parse({"prompt": [10**6]}, model)
    assert caught.value.param == "prompt"


def test_choices_stand_in_the_order_of_prompts(model: ServedModel) -> None:
    body = answer(model, ["a", "bb", "c", "dd"], prompt=["x", "yy"], n=2)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "a"),
        (1, "bb"),
        (2, "c"),
        (3, "dd"),
    ]
    assert body["usage"]["prompt_tokens"] == 2 + 3
    chunks = stream(model, ["a", "bb", "c", "dd"], prompt=["x", "yy"], n=2)
    assert [text_of(chunks, index) for index in range(4)] == ["a", "bb", "c", "dd"]


def test_stream_frame(model: ServedModel) -> None:
    chunks = stream(model, ["abc"], stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [choice["finish_reason"] for choice in choices_of(chunks)] == [None] * 3 + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_echo(model: ServedModel) -> None:
    assert answer(model, [" you"], echo=True)["choices"][0]["text"] == "hi you"
    assert text_of(stream(model, [" you"], echo=True)) == "hi you"
    assert answer(model, [""], echo=True, prompt=encoded(model, "ok"))["choices"][0]["text"] == "ok"


def test_logprobs(model: ServedModel) -> None:
    logprobs = answer(model, ["ab"], logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["token_logprobs"] == [-0.1, -0.1]
    assert logprobs["top_logprobs"] == [{"a": -0.1}, {"b": -0.1}]
    assert logprobs["text_offset"] == [0, 1]
    zero = answer(model, ["ab"], logprobs=0)["choices"][0]["logprobs"]
    assert zero["token_logprobs"] == [-0.1, -0.1]


def test_echo_with_logprobs_scores_the_prompt(model: ServedModel) -> None:
    fields = {"echo": True, "logprobs": 1, "prompt": "hi"}
    logprobs = answer(model, ["ab"], **fields)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", "h", "i", "a", "b"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.1, -0.1]
    assert logprobs["top_logprobs"][0] is None
    chunks = stream(model, ["ab"], **fields)
    streamed = [choice["logprobs"] for choice in choices_of(chunks) if choice["logprobs"]]
    for name in logprobs:
        assert list(chain.from_iterable(part[name] for part in streamed)) == logprobs[name]


def test_no_tokens_asked_for_scores_only(model: ServedModel) -> None:
    body = answer(model, ["x"], "length", max_tokens=0, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


def test_best_of_answers_with_the_most_likely(model: ServedModel) -> None:
    call = completions.parse({"prompt": "hi", "best_of": 3, "n": 2}, model)
    events = FakeEvents(
        [
            event
            for index, logprob in enumerate([-3.0, -1.0, -2.0])
            for event in (
                (index, Tokens("r", encoded(model, "abc"[index]), [logprob])),
                (index, Finished("r", "length")),
            )
        ]
    )
    body = call.collect(events)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "b"), (1, "c")]
    assert body["usage"]["completion_tokens"] == 3
    assert all(choice["logprobs"] is None for choice in body["choices"])


def test_an_empty_prompt_begins_a_text(tmp_path: Path, model: ServedModel) -> None:
    bos = SPECIAL.index("<s>")
    assert completions.parse({"prompt": ""}, model).sequences[0].prompt_ids == [bos]
    without = make_model(tmp_path)
    assert completions.parse({"prompt": ""}, without).sequences[0].prompt_ids == [bos]
    nothing = make_model(tmp_path, special_tokens={})
    with pytest.raises(ApiError, match="`prompt` is empty"):
        completions.parse({"prompt": ""}, nothing)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 4, "n": 100}, "n"),
        ({"prompt": "\udfff"}, "prompt"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"max_tokens": 300}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_refusals(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    model = make_model(tmp_path, limits=ServingLimits(max_client_batch_size=4))
    with pytest.raises(ApiError) as caught:
        completions.parse({"prompt": "hi", **fields}, model)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_bodies_that_clients_send(model: ServedModel) -> None:
    huggingface_js = {
        "model": "http://127.0.0.1:8080",
        "max_tokens": 4,
        "details": True,
        "return_full_text": False,
        "stop": ["@@"],
        "do_sample": False,
        "seed": 1,
        "repetition_penalty": 1.1,
        "top_k": 5,
        "typical_p": 0.9,
        "truncate": None,
        "watermark": False,
        "prompt": "hi",
    }
    (sequence,) = completions.parse(huggingface_js, model).sequences
    assert sequence.sampling.temperature == 0
    langchain = {
        "prompt": ["hi"],
        "frequency_penalty": 0,
        "logprobs": None,
        "max_tokens": 4,
        "n": 1,
        "presence_penalty": 0,
        "seed": None,
        "temperature": 0.7,
        "top_p": 1,
    }
    assert len(completions.parse(langchain, model).sequences) == 1


@given(st.text('ab é😀\n"', max_size=8), st.booleans(), st.sampled_from([None, 0, 2]))
def test_stream_and_plain_answer_agree(
    model: ServedModel, text: str, echo: bool, logprobs: int | None
) -> None:
    fields = {"echo": echo, "logprobs": logprobs, "stop": ["ab"]}
    plain = answer(model, [text], **fields)["choices"][0]
    chunks = stream(model, [text], **fields)
    assert text_of(chunks) == plain["text"]
    parts = [choice["logprobs"] for choice in choices_of(chunks) if choice["logprobs"]]
    for name in plain["logprobs"] or {}:
        assert list(chain.from_iterable(part[name] for part in parts)) == plain["logprobs"][name]
