"""TGI's habits are kept where `--tgi-strict` asks for them, and nowhere else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from container.settings import resolve
from container.web.handlers import real_handlers
from handler import chat, completions, generate
from handler.contract import ApiError
from handler.runner.protocol import FinishReason
from handler.served_model import ServedModel, ServingLimits
from handler_support import EOS, make_card, make_model, play

MESSAGES = [{"role": "user", "content": "hi"}]
WORDS = "red STOP blue"


@pytest.fixture(scope="module", params=[False, True], ids=["openai", "tgi"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    limits = ServingLimits(tgi_strict=request.param)
    return make_model(tmp_path_factory.mktemp("model"), limits=limits)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_model(tmp_path_factory.mktemp("model"), limits=ServingLimits(tgi_strict=True))


def call(model: ServedModel, **fields: Any) -> Any:
    if "prompt" in fields:
        return completions.parse(fields, model)
    return chat.parse({"messages": MESSAGES, **fields}, model)


def events(model: ServedModel, made: Any, reason: FinishReason = "eos") -> Any:
    script = [*model.tokenizer.encode(WORDS, add_special_tokens=False).ids, EOS]
    if reason == "length":
        script.pop()
    return play(model.tokenizer, made.sequences, [script], reason=reason)


def choice(model: ServedModel, reason: FinishReason = "eos", **fields: Any) -> dict[str, Any]:
    made = call(model, **fields)
    (found,) = made.collect(events(model, made, reason))["choices"]
    return dict(found)


def reasons(model: ServedModel, reason: FinishReason = "eos", **fields: Any) -> list[Any]:
    made = call(model, stream=True, **fields)
    chunks = [json.loads(payload) for payload in made.payloads(events(model, made, reason))]
    return [one["finish_reason"] for chunk in chunks for one in chunk["choices"]]


def test_stop_text_is_kept_and_named(model: ServedModel) -> None:
    strict = model.limits.tgi_strict
    text, reason = ("red STOP", "stop_sequence") if strict else ("red ", "stop")
    chatted = choice(model, stop="STOP")
    assert (chatted["message"]["content"], chatted["finish_reason"]) == (text, reason)
    completed = choice(model, stop="STOP", prompt="hi")
    assert (completed["text"], completed["finish_reason"]) == (text, reason)


def test_the_request_decides_over_the_stop_text(strict: ServedModel) -> None:
    own = {"stop": "STOP", "include_stop_str_in_output": False}
    assert choice(strict, **own)["message"]["content"] == "red "
    assert choice(strict, prompt="hi", **own)["text"] == "red "


@pytest.mark.parametrize(("reason", "told"), [("eos", "stop"), ("length", "length")])
def test_other_ends_are_openais_in_one_piece(
    model: ServedModel, reason: FinishReason, told: str
) -> None:
    assert choice(model, reason)["finish_reason"] == told
    assert choice(model, reason, prompt="hi")["finish_reason"] == told
    assert reasons(model, reason)[-1] == told
    assert set(reasons(model, reason)[:-1]) == {None}


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [("eos", None, "eos_token"), ("length", None, "length"), ("eos", "STOP", "stop_sequence")],
)
def test_streams_of_completions_have_tgis_words(
    strict: ServedModel, reason: FinishReason, stop: str | None, told: str
) -> None:
    *before, last = reasons(strict, reason, prompt="hi", stop=stop)
    assert set(before) == {""}
    assert last == told


def test_a_streams_words_are_openais_without_it(tmp_path: Path) -> None:
    *before, last = reasons(make_model(tmp_path), prompt="hi")
    assert set(before) == {None}
    assert last == "stop"


@pytest.mark.parametrize(("given", "repetition"), [(0, 2.0), (-1.5, 0.5), (2, 4.0)])
def test_a_chats_presence_penalty_is_a_repetition_penalty(
    model: ServedModel, given: float, repetition: float
) -> None:
    (sequence,) = call(model, presence_penalty=given).sequences
    kept = (0.0, repetition) if model.limits.tgi_strict else (given, 1.0)
    assert (sequence.sampling.presence_penalty, sequence.sampling.repetition_penalty) == kept


def test_a_presence_penalty_that_is_not_given_is_none(strict: ServedModel) -> None:
    for fields in ({}, {"presence_penalty": None}):
        (sequence,) = call(strict, **fields).sequences
        assert sequence.sampling.repetition_penalty == 1.0


def test_a_presence_penalty_that_leaves_no_repetition_penalty_is_refused(
    strict: ServedModel,
) -> None:
    with pytest.raises(ApiError, match="`presence_penalty` must be above -2") as caught:
        call(strict, presence_penalty=-2)
    assert (caught.value.status, caught.value.param) == (400, "presence_penalty")


@pytest.mark.parametrize("rest", [{}, {"parameters": None}, {"parameters": {}}])
def test_generate_samples_where_parameters_are_absent(
    model: ServedModel, rest: dict[str, Any]
) -> None:
    made = generate.parse({"inputs": "hi", **rest}, model, compat=False, stream=False)
    samples = model.limits.tgi_strict and rest.get("parameters") is None
    assert made.sequences[0].sampling.temperature == (1.0 if samples else 0.0)


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [([], {}, False), (["--tgi-strict"], {}, True), ([], {"TGI_STRICT": "true"}, True)],
)
def test_the_setting_reaches_the_handlers(
    tmp_path: Path, arguments: list[str], environ: dict[str, str], expected: bool
) -> None:
    build: Callable[..., ServedModel] = real_handlers().build_model
    settings = resolve(arguments, environ).settings
    assert build(make_card(tmp_path), settings).limits.tgi_strict is expected
