"""What each field accepts, and the sentence a client gets for anything else."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handler.contract import ApiError
from handler.schema.messages import ROLES, read_messages, read_tools
from handler.schema.openai import read_chat, read_completion
from handler.schema.tgi import read_generate
from handler.served_model import ServingLimits

HI = [{"role": "user", "content": "hi"}]
OPTIONAL_FIELDS = (
    "model",
    "n",
    "stream",
    "stream_options",
    "stop",
    "seed",
    "temperature",
    "top_p",
    "frequency_penalty",
    "tools",
    "presence_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "response_format",
    "tool_choice",
    "max_tokens",
    "logprobs",
    "documents",
    "max_completion_tokens",
    "top_logprobs",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "user",
    "functions",
    "modalities",
    "parallel_tool_calls",
)


def chat_error(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_chat({"messages": HI, **fields})
    return caught.value


def generate_error(inputs: Any = "hi", **parameters: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_generate({"inputs": inputs, "parameters": parameters}, ServingLimits(), stream=None)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("temperature", -0.1, "a number from 0 to 2, not -0.1"),
        ("temperature", 2.5, "a number from 0 to 2, not 2.5"),
        ("temperature", "hot", 'a number from 0 to 2, not "hot"'),
        ("temperature", float("nan"), "a number from 0 to 2, not NaN"),
        ("top_p", 1.1, "a number from 0 to 1"),
        ("presence_penalty", -2.5, "a number from -2 to 2"),
        ("frequency_penalty", "x", "a number from -2 to 2"),
        ("n", 0, "a whole number from 1 to 128"),
        ("n", 1.5, "a whole number from 1 to 128"),
        ("n", 10**9, "a whole number from 1 to 128"),
        ("max_tokens", 0, "a whole number of at least 1"),
        ("max_tokens", "5", "a whole number of at least 1"),
        ("max_completion_tokens", -1, "a whole number of at least 1"),
        ("stop", 5, "a string or a list of up to 16 strings"),
        ("stop", "", "a string or a list of up to 16 strings"),
        ("stop", ["a", ""], "a string or a list of up to 16 strings"),
        ("stop", ["x"] * 100_000, "a string or a list of up to 16 strings"),
        ("seed", 2**64, "a whole number that fits in 64 bits"),
        ("seed", 1.5, "a whole number that fits in 64 bits"),
        ("top_logprobs", 100_000, "a whole number from 0 to 20"),
        ("stream", "yes", "true or false"),
        ("stream_options", 5, 'an object such as {"include_usage": true}'),
        ("logit_bias", {"5": 200}, "token ids with numbers from -100 to 100"),
        ("logit_bias", [1.0], "token ids with numbers from -100 to 100"),
        ("top_k", -2, "at least -1"),
        ("model", 5, "a string, not 5"),
        ("tools", "x", "a list of tools"),
        ("tool_choice", "sometimes", '"none" or "auto"'),
        ("modalities", ["audio"], '["text"]'),
    ],
)
def test_a_bad_chat_field_is_named_with_what_it_accepts(
    field: str, value: Any, accepted: str
) -> None:
    error = chat_error(**{field: value})
    assert error.status == 400
    assert error.param == field
    assert error.message.startswith(f"`{field}` must be ")
    assert accepted in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("return_tokens_as_token_ids", True),
        ("functions", [{"name": "f"}]),
        ("guided_json", {"type": "object"}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("top_logprobs", 2),
    ],
)
def test_what_would_change_the_answer_is_refused_not_ignored(field: str, value: Any) -> None:
    error = chat_error(**{field: value})
    assert (error.status, error.param) == (400, field)
    assert f"`{field}`" in error.message


def test_null_is_the_same_as_not_given() -> None:
    nulls, *_ = read_chat({"messages": HI, **dict.fromkeys(OPTIONAL_FIELDS)})
    absent, *_ = read_chat({"messages": HI})
    assert nulls == absent


def test_fields_that_cannot_change_the_text_are_accepted() -> None:
    read_chat(
        {
            "messages": HI,
            "user": "u",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "parallel_tool_calls": False,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "tool_choice": "none",
            "tools": [],
            "sagemaker_base_url": "http://x",
            "foo": {"a": 1},
        }
    )


def test_tools_are_hidden_where_none_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read_chat({"messages": HI, "tools": tools})[2] == tools
    assert read_chat({"messages": HI, "tools": tools, "tool_choice": "none"})[2] is None
    assert read_tools([], "openai") is None


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([*HI, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_a_bad_message_is_named_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages(messages, "openai")
    assert caught.value.param == param
    assert caught.value.status == 400


def test_tool_call_arguments_become_objects_where_they_are() -> None:
    def arguments(given: Any) -> Any:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}], "openai")
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a": "é"}') == {"a": "é"}
    assert arguments("") == {}
    assert arguments('{"cut') == '{"cut'
    assert arguments({"a": 1}) == {"a": 1}


def test_null_keys_of_messages_are_dropped() -> None:
    (message,) = read_messages([{**HI[0], "name": None, "tool_calls": None}], "openai")
    assert message == HI[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
BODIES = st.dictionaries(
    st.sampled_from(
        [
            "messages",
            "prompt",
            "inputs",
            "parameters",
            "stop",
            "n",
            "tools",
            "tool_choice",
            "logit_bias",
            "seed",
            "stream",
        ]
    ),
    JSON,
)


@settings(deadline=None)
@given(JSON | BODIES)
def test_any_body_is_read_or_refused(body: Any) -> None:
    assert status_of(read_chat, body) in (200, 400)
    assert status_of(read_completion, body) in (200, 400)
    assert status_of(lambda body: read_generate(body, ServingLimits(), stream=None), body) in (
        200,
        422,
    )


def status_of(read: Callable[[Any], Any], body: Any) -> int:
    try:
        read(body)
    except ApiError as error:
        return error.status
    return 200


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "x"]), JSON)))
def test_any_messages_are_read_or_refused(messages: Any) -> None:
    try:
        read = read_messages(messages, "openai")
    except ApiError:
        return
    assert all(message["role"] in ROLES for message in read)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"temperature": "x"}, '`temperature` must be strictly positive. Given: "x"'),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_p": 0}, "`top_p` must be > 0.0 and <= 1.0"),
        ({"typical_p": 1.5}, "`typical_p` must be > 0.0 and <= 1.0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
        (
            {"best_of": 2, "do_sample": True, "seed": 1},
            "`seed` must not be set when `best_of` > 1",
        ),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"stop_sequences": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"watermark": True}, "`watermark` is not supported; leave it out"),
        ({"grammar": {"type": "json"}}, "`grammar` is not supported; leave it out"),
    ],
)
def test_tgis_own_sentences(parameters: dict[str, Any], sentence: str) -> None:
    error = generate_error(**parameters)
    assert (error.status, error.kind) == (422, "validation")
    assert error.message == f"Input validation error: {sentence}"


def test_tgi_inputs() -> None:
    assert generate_error("").message.endswith("`inputs` cannot be empty")
    assert generate_error(["a"]).message.endswith("`inputs` must be a string. Given: a list")
    with pytest.raises(ApiError, match="`inputs` is required: a string"):
        read_generate({}, ServingLimits(), stream=None)
    with pytest.raises(ApiError, match="`parameters` must be an object"):
        read_generate({"inputs": "x", "parameters": 5}, ServingLimits(), stream=None)


def test_the_body_of_the_old_python_client() -> None:
    nulls = "repetition_penalty frequency_penalty seed temperature top_k top_p truncate typical_p"
    parameters = {
        **dict.fromkeys([*nulls.split(), "best_of", "top_n_tokens", "grammar"]),
        "do_sample": False,
        "max_new_tokens": 20,
        "return_full_text": False,
        "stop": [],
        "watermark": False,
        "details": True,
        "decoder_input_details": False,
    }
    request = read_generate(
        {"inputs": "x", "parameters": parameters, "stream": False}, ServingLimits(), stream=None
    )
    assert not request.parameters.samples
    assert request.parameters.max_new_tokens == 20


@pytest.mark.parametrize("prompt", [[], None, 5, [1.5], ["a", 1], {"a": 1}, [[]], [[True]]])
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion({"prompt": prompt})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert read_completion({"prompt": prompt})[1] == prompts
