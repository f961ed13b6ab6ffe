"""What a chat request becomes before the runner sees it: prompt, budget, sampling, or a refusal."""

from pathlib import Path
from typing import Any

import pytest

from handler import chat
from handler.contract import ApiError
from handler.served_model import ServedModel, ServingLimits
from handler_support import CHATML, SPECIAL, byte_level_tokenizer, make_card, make_model

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


def test_sampling_reaches_the_runner(model: ServedModel) -> None:
    fields = {
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"7": -100},
        "seed": -1,
    }
    (sequence,) = chat.parse({"messages": HI, "min_tokens": 2, **fields}, model).sequences
    sampling = sequence.sampling
    assert (sampling.top_k, sampling.logit_bias, sampling.seed) == (0, {7: -100.0}, -1)
    for name in set(fields) - {"top_k", "logit_bias"}:
        assert getattr(sampling, name) == fields[name]
    assert sequence.min_tokens == 2
    (greedy,) = chat.parse({"messages": HI, "do_sample": False}, model).sequences
    assert greedy.sampling.temperature == 0
    (default,) = chat.parse({"messages": HI}, model).sequences
    assert default.sampling.temperature == 1


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, 235),
        ({"max_tokens": None}, 235),
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
    ],
)
def test_token_budget(model: ServedModel, fields: dict[str, Any], budget: int) -> None:
    (sequence,) = chat.parse({"messages": HI, **fields}, model).sequences
    assert len(sequence.prompt_ids) == 21
    assert sequence.max_new_tokens == budget


@pytest.mark.parametrize("stream", [False, True])
def test_the_context_at_its_limit(model: ServedModel, stream: bool) -> None:
    def parse(num_letters: int, **fields: Any) -> chat.ChatCall:
        messages = [{"role": "user", "content": "a" * num_letters}]
        return chat.parse({"messages": messages, "stream": stream, **fields}, model)

    overhead = 19
    (fits,) = parse(255 - overhead).sequences
    assert (len(fits.prompt_ids), fits.max_new_tokens) == (255, 1)
    for letters, fields, number in (
        (256 - overhead, {}, "256"),
        (254 - overhead, {"max_tokens": 3}, "257"),
        (10, {"max_tokens": 10**12}, str(10**12 + 29)),
        (10**6, {}, "1000050 characters"),
    ):
        with pytest.raises(ApiError) as caught:
            parse(letters, **fields)
        error = caught.value
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert error.message.startswith("This model's maximum context length is 256 tokens")
        assert number in error.message


def test_one_begin_token_even_if_the_tokenizer_adds_one(tmp_path: Path) -> None:
    template = "<s>{{ messages[0].content }}"
    model = make_model(
        tmp_path, byte_level_tokenizer(adds_bos=True), chat_templates={"default": template}
    )
    (sequence,) = chat.parse({"messages": HI}, model).sequences
    assert sequence.prompt_ids.count(SPECIAL.index("<s>")) == 1


def test_text_parts_are_joined_for_templates_that_take_strings(model: ServedModel) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    joined = chat.parse({"messages": [{"role": "user", "content": parts}]}, model)
    assert joined.sequences[0].prompt_ids == (
        chat.parse({"messages": HI}, model).sequences[0].prompt_ids
    )


def prompt_text(model: ServedModel, **fields: Any) -> str:
    (sequence,) = chat.parse({"messages": HI, **fields}, model).sequences
    return str(model.tokenizer.decode(sequence.prompt_ids, skip_special_tokens=False))


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_tool_call_without_content_goes_through_templates_that_add_strings(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    template = "{% for m in messages %}{{ m.role + '|' + m['content'] + ';' }}{% endfor %}"
    model = make_model(tmp_path, byte_level_tokenizer(), chat_templates={"default": template})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call], **content}]
    parsed = chat.parse({"messages": [*messages, {"role": "tool", "content": "2"}]}, model)
    assert parsed.usage.prompt_characters == len("user|hi;assistant|;tool|2;")


def test_template_options(tmp_path: Path) -> None:
    source = (
        "{{ messages[-1].role }}:{{ messages[-1].content }}|{{ think }}|{{ documents }}|{{ tools }}"
        "{% if add_generation_prompt %}|go{% endif %}"
    )
    tool_use = "TOOL {{ tools[0].function.name }}"
    model = make_model(tmp_path, chat_templates={"default": source, "tool_use": tool_use})
    assert prompt_text(model) == "user:hi||None|None|go"
    assert prompt_text(model, add_generation_prompt=False) == "user:hi||None|None"
    assert prompt_text(model, chat_template_kwargs={"think": 1}) == "user:hi|1|None|None|go"
    assert prompt_text(model, documents=[{"text": "d"}]) == "user:hi||[{'text': 'd'}]|None|go"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt_text(model, tools=tools) == "TOOL f"
    assert prompt_text(model, chat_template="tool_use", tools=tools) == "TOOL f"
    developer = [{"role": "developer", "content": "hi"}]
    assert prompt_text(model, messages=developer).startswith("system:hi")


def test_a_trailing_assistant_message_is_continued(model: ServedModel) -> None:
    begun = [*HI, {"role": "assistant", "content": "Well"}]
    assert prompt_text(model, messages=begun).endswith("<|im_start|>assistant\nWell")
    assert prompt_text(model, messages=begun, add_generation_prompt=True).endswith(
        "Well<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_text(model, messages=begun, continue_final_message=False).endswith(
        "Well<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_refusals_that_need_the_model(
    model: ServedModel, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat.parse({"messages": HI, **fields}, model)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_request_may_bring_a_template_where_allowed(tmp_path: Path) -> None:
    limits = ServingLimits(allow_request_template=True)
    model = make_model(tmp_path, limits=limits)
    assert prompt_text(model, chat_template="X{{ messages[0].content }}") == "Xhi"
    with pytest.raises(ApiError, match="does not compile: line 1"):
        chat.parse({"messages": HI, "chat_template": "{% if"}, model)


def test_no_template_is_said_with_the_places_and_the_remedy(tmp_path: Path) -> None:
    model = make_model(tmp_path, chat_templates={}, chat_template_source="looked in /m/a and /m/b")
    with pytest.raises(ApiError) as caught:
        chat.parse({"messages": HI}, model)
    assert caught.value.status == 400
    for part in ("chat_template is not set", "/m/a and /m/b", "--chat-template"):
        assert part in caught.value.message


def test_a_templates_refusal_is_a_400_with_its_words(tmp_path: Path) -> None:
    source = "{{ raise_exception('turns must alternate') }}"
    model = make_model(tmp_path, chat_templates={"default": source})
    with pytest.raises(ApiError, match="turns must alternate") as caught:
        chat.parse({"messages": HI, "stream": True}, model)
    assert caught.value.status == 400


def test_a_template_that_does_not_compile_stops_the_start(tmp_path: Path) -> None:
    card = make_card(tmp_path, chat_templates={"default": CHATML, "tool_use": "a\n{% if %}"})
    with pytest.raises(ValueError, match=r"`tool_use` \(chat_template.jinja\).* line 2"):
        ServedModel(card)
