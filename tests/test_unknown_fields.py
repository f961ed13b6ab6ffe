"""Fields no API has: ignored, named in the debug log, and hinted at where a request fails."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.contract import ApiError
from handler.schema.openai import read_chat, read_completion
from handler.schema.tgi import TokenizeBody, read_generate
from handler.schema.validation import read
from handler.served_model import ServingLimits

HI = [{"role": "user", "content": "hi"}]


def generate(body: Any) -> Any:
    return read_generate(body, ServingLimits(), stream=None)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("reader", "body", "hint"),
    [
        (read_chat, {"message": HI}, "`message` is not a known field; did you mean `messages`?"),
        (read_chat, {"messages": HI, "max_token": 5, "n": 0}, "did you mean `max_tokens`?"),
        (read_chat, {"messages": HI, "maxTokens": 5, "n": 0}, "did you mean `max_tokens`?"),
        (read_completion, {"prompts": "hi"}, "did you mean `prompt`?"),
        (read_completion, {"prompt": "hi", "max_new_tokens": 5, "n": 0}, "mean `max_tokens`?"),
        (generate, {"input": "hi"}, "`input` is not a known field; did you mean `inputs`?"),
        (lambda body: read(TokenizeBody, body, "tgi"), {"input": "hi"}, "did you mean `inputs`?"),
    ],
)
def test_a_failing_request_hints_at_a_misspelt_field(reader: Any, body: Any, hint: str) -> None:
    with pytest.raises(ApiError) as caught:
        reader(body)
    assert caught.value.message.endswith(hint)


@pytest.mark.parametrize(
    ("reader", "body"),
    [
        (read_chat, {"messages": HI, "n": 0, "user": "x", "store": True, "foo": 1}),
        (read_chat, {"messages": HI, "n": 0, "max_tokens": 5, "min_tokens": 1}),
        (generate, {"inputs": 5, "parameters": {"stop_sequences": []}, "foo": 1}),
    ],
)
def test_other_fields_bring_no_hint(reader: Any, body: Any) -> None:
    with pytest.raises(ApiError) as caught:
        reader(body)
    assert "did you mean" not in caught.value.message


def test_what_is_ignored_is_named_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    read_chat({"messages": HI, "max_token": 5, "frob": "secret", "stream_options": {"x": 1}})
    assert sorted(logged(caplog)) == [
        "unknown fields are ignored: `max_token` (did you mean `max_tokens`?), `frob`",
        "unknown fields are ignored: `x`",
    ]
    caplog.clear()
    generate({"inputs": "hi", "parameters": {"temprature": 1, "stop_sequences": ["x"]}})
    assert logged(caplog) == [
        "unknown fields are ignored: `temprature` (did you mean `temperature`?)"
    ]


def test_known_fields_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    read_chat({"messages": HI, "user": "x", "metadata": {}, "suffix": None, "echo": False})
    read_completion({"prompt": "hi", "service_tier": "auto", "echo": True})
    read(TokenizeBody, {"inputs": "hi", "parameters": {}}, "tgi")
    assert not caplog.records


def test_strange_names_do_not_spoil_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    strange = {f"\n\x1b[1m\u2028{place}" + "x" * 10_000: 1 for place in range(1_000)}
    read_chat({**strange, "messages": HI})
    (line,) = logged(caplog)
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 4_000


@given(st.dictionaries(st.text(max_size=100), st.integers(), max_size=40))
def test_an_unknown_field_of_any_name_changes_nothing(fields: dict[str, int]) -> None:
    names = {f"?{name}": value for name, value in fields.items()}
    assert read_chat({**names, "messages": HI}) == read_chat({"messages": HI})
    with pytest.raises(ApiError) as caught:
        read_chat({**names, "messages": HI, "n": 0})
    assert caught.value.param == "n"
    assert len(caught.value.message) < 400
