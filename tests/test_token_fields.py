"""vLLM's fields about tokens, on chats and completions: cut prompts, ids, prompt log-probabilities.

Must not know: HTTP.
"""

import json
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler import chat, completions
from handler.chat import ChatCall
from handler.completions import CompletionCall
from handler.contract import ApiError
from handler.served_model import ServedModel
from handler_support import EOS, SPECIAL, byte_level_tokenizer, make_model, play

BOS = SPECIAL.index("<s>")
APIS = [
    (chat, {"messages": [{"role": "user", "content": "hello"}]}),
    (completions, {"prompt": "hello"}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer(adds_bos=True))


def ids_of(model: ServedModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False).ids)


def answer(model: ServedModel, call: ChatCall | CompletionCall, *texts: str) -> dict[str, Any]:
    scripts = [[*ids_of(model, text), EOS] for text in texts]
    return call.collect(play(model.tokenizer, call.sequences, scripts))


def stream(
    model: ServedModel, call: ChatCall | CompletionCall, *texts: str
) -> list[dict[str, Any]]:
    scripts = [[*ids_of(model, text), EOS] for text in texts]
    payloads = call.payloads(play(model.tokenizer, call.sequences, scripts))
    return [json.loads(payload) for payload in payloads]


def prompt_ids(api: ModuleType, model: ServedModel, body: dict[str, Any]) -> list[int]:
    ids: list[int] = api.parse(body, model).sequences[0].prompt_ids
    return ids


@pytest.mark.parametrize(("api", "body"), APIS)
@pytest.mark.parametrize("count", [1, 3, 200])
def test_the_last_tokens_are_kept(
    model: ServedModel, api: ModuleType, body: dict[str, Any], count: int
) -> None:
    whole = prompt_ids(api, model, body)
    call = api.parse({**body, "truncate_prompt_tokens": count}, model)
    assert call.sequences[0].prompt_ids == whole[-count:]
    assert call.usage.prompt_tokens == min(count, len(whole))


@pytest.mark.parametrize(
    ("api", "body", "asked", "kept"),
    [
        (completions, {"prompt": "x" * 9_999}, {}, 240),
        (completions, {"prompt": "x" * 999_999}, {"max_tokens": 0}, 255),
        (completions, {"prompt": [7] * 999}, {"max_tokens": 100}, 156),
        (chat, {"messages": [{"role": "user", "content": "x" * 9_999}]}, {}, 255),
        (chat, {"messages": [{"role": "user", "content": "x" * 9_999}]}, {"max_tokens": 56}, 200),
    ],
)
def test_as_many_as_fit_beside_the_answer(
    model: ServedModel,
    api: ModuleType,
    body: dict[str, Any],
    asked: dict[str, int],
    kept: int,
) -> None:
    ids = prompt_ids(api, model, {**body, **asked, "truncate_prompt_tokens": -1})
    assert len(ids) == kept
    with pytest.raises(ApiError, match="maximum context length"):
        api.parse({**body, **asked}, model)


@pytest.mark.parametrize(("api", "body"), APIS)
def test_nothing_fits_beside_an_answer_that_fills_the_context(
    model: ServedModel, api: ModuleType, body: dict[str, Any]
) -> None:
    with pytest.raises(ApiError, match="you requested 257 tokens"):
        api.parse({**body, "max_tokens": 256, "truncate_prompt_tokens": -1}, model)


def test_echo_repeats_what_was_read(model: ServedModel) -> None:
    for prompt in ("hello", ids_of(model, "hello")):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "truncate_prompt_tokens": 3}
        (choice,) = answer(model, completions.parse(body, model), "!")["choices"]
        assert choice["text"] == "llo!"
        assert choice["logprobs"]["tokens"] == ["l", "l", "o", "!"]
    empty = {"prompt": "", "echo": True, "truncate_prompt_tokens": 3}
    assert prompt_ids(completions, model, empty) == [BOS]


@pytest.mark.parametrize(("api", "body"), APIS)
def test_ids_are_told_where_asked_for(
    model: ServedModel, api: ModuleType, body: dict[str, Any]
) -> None:
    call = api.parse({**body, "n": 2, "return_token_ids": True}, model)
    found = answer(model, call, "ab", "c")
    choices = found["choices"]
    assert [choice["token_ids"] for choice in choices] == [
        [*ids_of(model, "ab"), EOS],
        [*ids_of(model, "c"), EOS],
    ]
    assert found["usage"]["completion_tokens"] == 5
    for holder in [found] if api is chat else choices:
        assert holder["prompt_token_ids"] == call.sequences[0].prompt_ids
    plain = json.dumps(answer(model, api.parse(body, model), "ab"))
    assert "token_ids" not in plain
    assert "prompt_logprobs" not in plain


def test_ids_end_where_a_stop_string_does(model: ServedModel) -> None:
    body = {"prompt": "x", "stop": "bc", "return_token_ids": True}
    found = answer(model, completions.parse(body, model), "abcd")
    assert found["choices"][0]["token_ids"] == ids_of(model, "abc")
    assert found["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("api", "body"), APIS)
@given(texts=st.lists(st.text(st.sampled_from("ab é€"), max_size=6), min_size=1, max_size=2))
def test_streamed_ids_are_those_of_the_plain_answer(
    model: ServedModel, api: ModuleType, body: dict[str, Any], texts: Sequence[str]
) -> None:
    body = {**body, "n": len(texts), "return_token_ids": True, "stop": "ba"}
    plain = answer(model, api.parse(body, model), *texts)["choices"]
    call = api.parse({**body, "stream": True}, model)
    chunks = stream(model, call, *texts)
    for index, expected in enumerate(plain):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        parts = [chunk["choices"][0] for chunk in mine]
        ids = [id_ for part in parts for id_ in part.get("token_ids", [])]
        assert ids == expected["token_ids"]
        first, *rest = mine if api is chat else parts
        assert first["prompt_token_ids"] == call.sequences[0].prompt_ids
        assert not any("prompt_token_ids" in later for later in rest)


@pytest.mark.parametrize(("api", "body"), APIS)
def test_prompt_logprobs(model: ServedModel, api: ModuleType, body: dict[str, Any]) -> None:
    call = api.parse({**body, "prompt_logprobs": 0}, model)
    found = answer(model, call, "a")
    first, *rest = (found if api is chat else found["choices"][0])["prompt_logprobs"]
    assert first is None
    ids = call.sequences[0].prompt_ids[1:]
    assert rest == [
        {
            str(token_id): {
                "logprob": -0.5,
                "rank": None,
                "decoded_token": model.vocabulary.token_text(token_id),
            }
        }
        for token_id in ids
    ]
    if api is completions:
        assert found["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("api", "body"), APIS)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"truncate_prompt_tokens": 0}, "at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "at least 1, or -1"),
        ({"truncate_prompt_tokens": "5"}, "at least 1, or -1"),
        ({"truncate_prompt_tokens": True}, "at least 1, or -1"),
        ({"truncate_prompt_tokens": 256}, "at most 255"),
        ({"return_token_ids": 1}, "true or false"),
        ({"prompt_logprobs": 1}, "must be 0, .*not available"),
        ({"prompt_logprobs": -1}, "must be 0, .*not available"),
        ({"prompt_logprobs": 0, "stream": True}, "not available with `stream`"),
    ],
)
def test_what_is_refused(
    model: ServedModel, api: ModuleType, body: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        api.parse({**body, **fields}, model)
    assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))


@pytest.mark.parametrize(("api", "body"), APIS)
def test_null_is_not_given(model: ServedModel, api: ModuleType, body: dict[str, Any]) -> None:
    names = ("truncate_prompt_tokens", "return_token_ids", "prompt_logprobs")
    assert prompt_ids(api, model, {**body, **dict.fromkeys(names)}) == prompt_ids(api, model, body)
