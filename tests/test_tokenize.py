"""`/tokenize`, `/chat_tokenize` and `/detokenize`: what the model reads, shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler import chat, completions
from handler.contract import ApiError
from handler.served_model import ServedModel
from handler.tokenize import chat_tokenize, detokenize, tokenize, vllm_tokenize
from handler_support import SPECIAL, byte_level_tokenizer, make_model

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer(adds_bos=True))


def test_tokens_with_their_place_in_the_text(model: ServedModel) -> None:
    begin, *rest = tokenize({"inputs": "Hi you"}, model)
    assert begin == {"id": SPECIAL.index("<s>"), "text": "", "start": 0, "stop": 0}
    assert "".join(token["text"] for token in rest) == "Hi you"
    assert all("Hi you"[token["start"] : token["stop"]] == token["text"] for token in rest)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_offsets_count_bytes(model: ServedModel, text: str) -> None:
    raw = text.encode()
    for token in tokenize({"inputs": text}, model):
        assert raw[token["start"] : token["stop"]].decode() == token["text"]


def test_only_the_text_matters(model: ServedModel) -> None:
    body = {"inputs": "a", "parameters": {"truncate": 0, "temperature": -1}}
    assert tokenize(body, model) == tokenize({"inputs": "a"}, model)


def test_chat_tokenize_shows_what_a_chat_sends(model: ServedModel) -> None:
    shown = chat_tokenize({"messages": HI}, model)
    assert shown["templated_text"] == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    (sequence,) = chat.parse({"messages": HI}, model).sequences
    assert [token["id"] for token in shown["tokenize_response"]] == sequence.prompt_ids


@pytest.mark.parametrize("body", [{}, {"inputs": 5}, {"inputs": "\ud800"}, []])
def test_bad_bodies(model: ServedModel, body: object) -> None:
    for call in (tokenize, chat_tokenize):
        with pytest.raises(ApiError) as caught:
            call(body, model)
        assert (caught.value.status, caught.value.kind) == (422, "validation")
        assert caught.value.message.startswith("Input validation error: ")


def test_template_errors_have_tgis_form(tmp_path: Path) -> None:
    source = "{{ raise_exception('no') }}"
    model = make_model(tmp_path, chat_templates={"default": source})
    with pytest.raises(ApiError) as caught:
        chat_tokenize({"messages": HI}, model)
    assert caught.value.message == "Template error: no"
    assert (caught.value.status, caught.value.kind) == (422, "template_error")


def test_vllms_form_counts_what_a_completion_reads(model: ServedModel) -> None:
    answer = vllm_tokenize({"model": "m", "prompt": "Hi"}, model)
    (sequence,) = completions.parse({"prompt": "Hi"}, model).sequences
    assert answer == {
        "count": 3,
        "max_model_len": 256,
        "tokens": sequence.prompt_ids,
        "token_strs": None,
    }
    body = {"prompt": "H i", "add_special_tokens": False, "return_token_strs": True}
    assert vllm_tokenize(body, model)["token_strs"] == ["H", "Ġ", "i"]


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
def test_vllms_form_counts_what_a_chat_reads(model: ServedModel, fields: dict[str, object]) -> None:
    body = {"messages": HI, **fields}
    (sequence,) = chat.parse(body, model).sequences
    assert vllm_tokenize(body, model)["tokens"] == sequence.prompt_ids
    body["add_special_tokens"] = True
    (begun,) = chat.parse(body, model).sequences
    assert begun.prompt_ids == [SPECIAL.index("<s>"), *sequence.prompt_ids]
    assert vllm_tokenize(body, model)["tokens"] == begun.prompt_ids


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.booleans())
def test_detokenize_undoes_tokenize(model: ServedModel, text: str, adds: bool) -> None:
    ids = vllm_tokenize({"prompt": text, "add_special_tokens": adds}, model)["tokens"]
    prefix = "<s>" if adds else ""
    assert detokenize({"tokens": ids}, model) == {"prompt": prefix + text}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "`tokens` is required"),
        ({"tokens": "hi"}, "a list of token ids"),
        ({"tokens": [1.5]}, "a list of token ids"),
        ({"tokens": [True]}, "a list of token ids"),
        ({"tokens": [-1]}, "a list of token ids"),
        ({"tokens": [2**70]}, "token ids from 0 to"),
        ({"tokens": [100_000]}, "token ids from 0 to"),
        ({"tokens": [1] * 1_000_001}, "up to 1000000 ids"),
        ([], "JSON object"),
    ],
)
def test_what_cannot_be_detokenized(model: ServedModel, body: object, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        detokenize(body, model)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": HI, "return_token_strs": 1}, "return_token_strs"),
    ],
)
def test_vllms_form_refuses_in_openais_shape(model: ServedModel, body: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        vllm_tokenize(body, model)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_text_is_bounded_and_may_exceed_the_context(model: ServedModel) -> None:
    text = "a" * 1_000_000
    assert vllm_tokenize({"prompt": text[:2_000]}, model)["count"] == 2_001
    for call, body in [
        (tokenize, {"inputs": text + "a"}),
        (vllm_tokenize, {"prompt": text + "a"}),
        (vllm_tokenize, {"messages": [{"role": "user", "content": text}]}),
        (chat_tokenize, {"messages": [{"role": "user", "content": text}]}),
    ]:
        with pytest.raises(ApiError, match="up to 1000000 characters"):
            call(body, model)
