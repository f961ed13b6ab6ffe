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
from handler.served_model import ServedModel
from handler_support import (
    EOS,
    SPECIAL,
    FakeEvents,
    byte_letters,
    byte_level_tokenizer,
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
