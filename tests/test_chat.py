"""Chat calls: from body to sequences, from events to answers and chunks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler import chat
from handler.contract import ApiError
from handler.runner.protocol import Failed, Finished, FinishReason, Tokens
from handler.served_model import ServedModel, ServingLimits
from handler_support import (
    CHATML,
    EOS,
    SPECIAL,
    FakeEvents,
    byte_letters,
    byte_level_tokenizer,
    make_card,
    make_model,
    play,
)

WORDS = [" alpha", " be", "ta", " gam", "ma", " delta", " one", " tw", "ig", " three"]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer(WORDS))


def ids_of(model: ServedModel, pieces: Sequence[str | bytes]) -> list[int]:
    """Ids of the words of the vocabulary, and of single bytes."""
    ids: list[int] = []
    for piece in pieces:
        if piece in WORDS:
            ids.append(model.tokenizer.token_to_id(str(piece).replace(" ", "Ġ")))
        else:
            raw = piece.encode() if isinstance(piece, str) else piece
            ids += [model.tokenizer.token_to_id(byte_letters()[byte]) for byte in raw]
    return ids


def answer(
    model: ServedModel,
    script: Sequence[int],
    reason: FinishReason = "eos",
    **fields: Any,
) -> dict[str, Any]:
    """The plain answer to `HI` of a runner that says `script`."""
    call = chat.parse({"messages": HI, **fields}, model)
    scripts = [script] * len(call.sequences)
    return call.collect(play(model.tokenizer, call.sequences, scripts, reason=reason))


def stream(
    model: ServedModel,
    script: Sequence[int],
    reason: FinishReason = "eos",
    **fields: Any,
) -> list[dict[str, Any]]:
    """The chunks of the same."""
    call = chat.parse({"messages": HI, "stream": True, **fields}, model)
    assert call.stream
    assert call.done_marker
    scripts = [script] * len(call.sequences)
    events = play(model.tokenizer, call.sequences, scripts, reason=reason)
    return [json.loads(payload) for payload in call.payloads(events)]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(delta.get("content", "") for delta in deltas(chunks, index))


def deltas(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


def reasons(chunks: list[dict[str, Any]]) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def test_plain_answer(model: ServedModel) -> None:
    body = answer(model, [*ids_of(model, [" alpha", " be", "ta"]), EOS])
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "org/tiny"
    assert body["system_fingerprint"] == "1.2.3-native"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " alpha beta", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = body["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    json.dumps(body)


def test_stream_frame(model: ServedModel) -> None:
    chunks = stream(model, [*ids_of(model, [" alpha", " be", "ta"]), EOS])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for name in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1
    first, *middle, last = deltas(chunks)
    assert first["role"] == "assistant"
    assert first["content"] == ""
    assert all("role" not in delta for delta in middle)
    assert last == {}
    assert reasons(chunks) == ["stop"]
    assert text_of(chunks) == " alpha beta"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_chunk_comes_last_and_alone(model: ServedModel) -> None:
    script = [*ids_of(model, [" one"]), EOS]
    chunks = stream(model, script, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer(model, script)["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_a_call_counts_for_the_log_line(model: ServedModel) -> None:
    call = chat.parse({"messages": HI}, model)
    call.collect(play(model.tokenizer, call.sequences, [[*ids_of(model, [" one"]), EOS]]))
    assert call.usage.prompt_tokens == len(call.sequences[0].prompt_ids)
    assert call.usage.prompt_characters == len(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert call.usage.completion_tokens == 2
    assert call.usage.finish_reasons == ["stop"]
    assert (call.usage.queue_s, call.usage.inference_s) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("script", "stop", "text"),
    [
        ([" alpha", " be", "ta", " gam", "ma", " delta"], ["beta gam"], " alpha "),
        ([" alpha", " be", "ta", " gam", "ma", " delta"], ["amm"], " alpha beta g"),
        ([" one", " tw", "ig", " three"], ["two"], " one twig three"),
        ([" x1", "ZQ", "ZR", " x2"], ["ZR", "ZQ"], " x1"),
        ([" alpha", " delta"], ["delta!"], " alpha delta"),
        ([" alpha", " delta"], "delta", " alpha "),
        ([" alpha", " delta"], [], " alpha delta"),
    ],
)
def test_stop_strings(
    model: ServedModel, script: list[str], stop: str | list[str], text: str
) -> None:
    ids = [*ids_of(model, script), EOS]
    body = answer(model, ids, stop=stop)
    assert body["choices"][0]["message"]["content"] == text
    assert body["choices"][0]["finish_reason"] == "stop"
    chunks = stream(model, ids, stop=stop)
    assert text_of(chunks) == text
    assert reasons(chunks) == ["stop"]


def test_a_stop_string_cancels_its_sequence_and_no_other(model: ServedModel) -> None:
    call = chat.parse({"messages": HI, "n": 2, "stop": ["beta"]}, model)
    scripts = [ids_of(model, [" be", "ta", " gam"]), [*ids_of(model, [" one"]), EOS]]
    events = play(model.tokenizer, call.sequences, scripts)
    body = call.collect(events)
    assert events.cancelled == [0]
    assert [choice["message"]["content"] for choice in body["choices"]] == [" ", " one"]
    assert body["usage"]["completion_tokens"] == 4


def test_stop_string_kept_where_asked(model: ServedModel) -> None:
    ids = ids_of(model, [" alpha", " be", "ta", " gam"])
    body = answer(model, ids, stop=["bet"], include_stop_str_in_output=True)
    assert body["choices"][0]["message"]["content"] == " alpha bet"


def test_stop_strings_do_not_count_before_min_tokens(model: ServedModel) -> None:
    ids = [*ids_of(model, [" one", " one", " one", " alpha"]), EOS]
    body = answer(model, ids, stop=["one"], min_tokens=3)
    assert body["choices"][0]["message"]["content"] == " one one "


def test_a_stop_string_that_is_a_special_token_stops_by_its_id(model: ServedModel) -> None:
    call = chat.parse({"messages": HI, "stop": ["<|im_start|>", "x"]}, model)
    assert call.sequences[0].stop_token_ids == [SPECIAL.index("<|im_start|>")]


def test_an_end_token_that_is_not_special_is_no_part_of_the_text(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer([" one", " END"])
    end = tokenizer.token_to_id("ĠEND")
    model = make_model(tmp_path, tokenizer, eos_token_ids=[EOS, end])
    ids = [tokenizer.token_to_id("Ġone"), end]
    assert answer(model, ids)["choices"][0]["message"]["content"] == " one"
    assert answer(model, ids, "length", ignore_eos=True)["choices"][0]["message"]["content"] == (
        " one END"
    )


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_a_character_cut_by_the_budget_is_the_same_in_both_modes(
    model: ServedModel, cut: int
) -> None:
    ids = ids_of(model, [" one", "😀"])[:cut]
    body = answer(model, ids, "length")
    chunks = stream(model, ids, "length")
    assert text_of(chunks) == body["choices"][0]["message"]["content"]
    assert all("\ufffd" not in delta.get("content", "") for delta in deltas(chunks)[:-2])
    assert reasons(chunks) == [body["choices"][0]["finish_reason"]] == ["length"]


def test_a_stream_that_says_nothing_still_ends(model: ServedModel) -> None:
    chunks = stream(model, [EOS])
    assert reasons(chunks) == ["stop"]
    assert text_of(chunks) == ""
    assert deltas(chunks)[0]["role"] == "assistant"


def test_choices_appear_in_order_and_differ_by_seed(model: ServedModel) -> None:
    call = chat.parse({"messages": HI, "n": 3, "seed": 2**64 - 1, "stream": True}, model)
    assert [sequence.sampling.seed for sequence in call.sequences] == [2**64 - 1, 0, 1]
    assert len({sequence.request_id for sequence in call.sequences}) == 3
    scripts = [[*ids_of(model, [" one"]), EOS]] * 3
    events = list(reversed(play(model.tokenizer, call.sequences, scripts).events))
    events.sort(key=lambda pair: isinstance(pair[1], Finished))
    chunks = [json.loads(payload) for payload in call.payloads(FakeEvents(events))]
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    assert [text_of(chunks, index) for index in range(3)] == [" one"] * 3


def test_logprobs(model: ServedModel) -> None:
    ids = [*ids_of(model, [" one", "é"]), EOS]
    body = answer(model, ids, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [" one", "\ufffd", "\ufffd"]
    assert [entry["bytes"] for entry in content] == [[32, 111, 110, 101], [0xC3], [0xA9]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(set(top) == {"token", "logprob", "bytes"} for top in content[0]["top_logprobs"])
    chunks = stream(model, ids, logprobs=True, top_logprobs=2)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


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


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("invalid", 400, None),
        ("too_long", 400, "context_length_exceeded"),
        ("overloaded", 429, None),
        ("unavailable", 503, None),
        ("internal", 500, None),
    ],
)
def test_a_failed_sequence(model: ServedModel, kind: Any, status: int, code: str | None) -> None:
    for streams in (False, True):
        call = chat.parse({"messages": HI, "stream": streams}, model)
        events = FakeEvents([(0, Failed("r", kind, "why"))])
        with pytest.raises(ApiError) as caught:
            # A stream, too, fails before its first chunk, so that the status can be the real one.
            next(call.payloads(events)) if streams else call.collect(events)
        assert (caught.value.status, caught.value.code) == (status, code)
        assert caught.value.message == "why"


def test_a_failure_in_the_middle_of_a_stream(model: ServedModel) -> None:
    call = chat.parse({"messages": HI, "stream": True}, model)
    first = Tokens("r", ids_of(model, [" one"]))
    payloads = call.payloads(FakeEvents([(0, first), (0, Failed("r", "unavailable", "gone"))]))
    assert json.loads(next(payloads))["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(next(payloads))["choices"][0]["delta"]["content"] == " one"
    with pytest.raises(ApiError, match="gone"):
        next(payloads)


PIECES = st.lists(
    st.sampled_from([*WORDS, "é", "😀", "日本", b"\xff", b"\xe2", "x", "\n", '"', "\\"]),
    max_size=12,
)


@given(PIECES, st.lists(st.sampled_from([" be", "ta g", "a", "日", "x\n", "z"]), max_size=3))
def test_stream_and_plain_answer_agree(
    model: ServedModel, pieces: list[str | bytes], stop: list[str]
) -> None:
    ids = [*ids_of(model, pieces), EOS]
    body = answer(model, ids, stop=stop)
    chunks = stream(model, ids, stop=stop, stream_options={"include_usage": True})
    assert text_of(chunks) == body["choices"][0]["message"]["content"]
    assert reasons(chunks) == [body["choices"][0]["finish_reason"]]
    assert chunks[-1]["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]
