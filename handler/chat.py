"""`POST /v1/chat/completions`: a conversation in, an answer or a stream of chunks out.

Must not know: Flask, the socket, TGI.
"""

from collections.abc import Iterator
from typing import Any

from handler.contract import Api, EventSource, Usage
from handler.conversation import render_openai_chat
from handler.openai_generation import (
    AnswerFrame,
    chat_logprobs,
    encode_prompt,
    finish_reason,
    json_bytes,
    room_for_answer,
    sequences,
    text_options,
    usage_body,
)
from handler.runner.protocol import Generate
from handler.schema.openai import ChatBody, read_chat
from handler.served_model import ServedModel
from handler.transcript import TokenLogprob, Transcript, follow


def parse(body: Any, model: ServedModel) -> "ChatCall":
    """Read a chat request. Raises ApiError (400) that names the field at fault."""
    request, messages, tools = read_chat(body)
    text = render_openai_chat(request, messages, tools, model)
    prompt_ids = encode_prompt(
        model, text, "messages", add_special_tokens=request.add_special_tokens
    )
    return ChatCall(request, model, text, prompt_ids)


class ChatCall:
    """One chat request; see `handler.contract.Call`."""

    api: Api = "openai"
    done_marker = True

    def __init__(
        self, request: ChatBody, model: ServedModel, text: str, prompt_ids: list[int]
    ) -> None:
        asked = request.max_completion_tokens or request.max_tokens
        budget = room_for_answer(model, "messages", len(prompt_ids), asked)
        self._model = model
        self._frame = AnswerFrame(model, "chatcmpl-", "chat.completion")
        self._wants_logprobs = request.logprobs
        self._wants_usage = request.stream_options.include_usage
        self.stream = request.stream
        self.sequences: list[Generate] = sequences(
            request,
            model,
            self._frame.id,
            [(prompt_ids, budget)],
            count=request.n,
            logprobs=request.top_logprobs if request.logprobs else None,
        )
        self.usage = Usage(prompt_tokens=len(prompt_ids), prompt_characters=len(text))
        options = text_options(request, model)
        self._transcripts = [Transcript(model.vocabulary, options) for _ in self.sequences]

    def collect(self, events: EventSource) -> dict[str, Any]:
        """The plain answer. Raises ApiError where a sequence fails."""
        texts = [""] * len(self._transcripts)
        for index, text in follow(self.api, events, self._transcripts, self.usage):
            texts[index] += text
        return {
            **self._frame.fields,
            "choices": [self._choice(index, text) for index, text in enumerate(texts)],
            "usage": usage_body(self.usage.prompt_tokens, self._transcripts),
        }

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        transcript = self._transcripts[index]
        logprobs = transcript.take_logprobs()
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(logprobs, self._model) if self._wants_logprobs else None,
            "finish_reason": self._ended(transcript),
        }

    def payloads(self, events: EventSource) -> Iterator[bytes]:
        """The chunks of a stream. Raises ApiError where a sequence fails."""
        head, tail = self._frame.chunk_borders(
            "chat.completion.chunk", usage_asked=self._wants_usage
        )
        role = b'"delta":{"role":"assistant","content":"","refusal":null}'
        first = True
        for index, text in follow(self.api, events, self._transcripts, self.usage):
            if first:  # only now is it certain that there will be an answer
                first = False
                for choice in range(len(self._transcripts)):
                    yield head + _choice(choice, role, b"null", b"null") + tail
            transcript = self._transcripts[index]
            logprobs = transcript.take_logprobs() if text or transcript.reason else []
            if text or logprobs:
                delta = b'"delta":{"content":' + json_bytes(text) + b"}"
                yield head + _choice(index, delta, self._logprobs_json(logprobs), b"null") + tail
            if transcript.reason:
                reason = json_bytes(self._ended(transcript))
                yield head + _choice(index, b'"delta":{}', b"null", reason) + tail
        if self._wants_usage:
            usage = json_bytes(usage_body(self.usage.prompt_tokens, self._transcripts))
            yield head + b'],"usage":' + usage + b"}"

    def _logprobs_json(self, entries: list[TokenLogprob]) -> bytes:
        if not self._wants_logprobs:
            return b"null"
        return json_bytes(chat_logprobs(entries, self._model))

    def _ended(self, transcript: Transcript) -> str:
        reason = finish_reason(transcript.reason)
        self.usage.finish_reasons.append(reason)
        return reason


def _choice(index: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
    return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
