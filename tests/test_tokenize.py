"""`/tokenize` and `/chat_tokenize`: what the model reads, shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler import chat
from handler.contract import ApiError
from handler.served_model import ServedModel
from handler.tokenize import chat_tokenize, tokenize
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
