"""`POST /v1/chat/completions`: a conversation in, an answer or a stream of chunks out.

Must not know: Flask, the socket, TGI.
"""

from collections.abc import Iterator
from typing import Any

from handler import tgi_strict
from handler.contract import Api, EventSource, Usage
from handler.conversation import render_openai_chat
from handler.openai_generation import (
    AnswerFrame,
    chat_logprobs,
    encode_prompt,
    finish_reason,
    json_bytes,
    more_fields,
    num_kept_tokens,
    prompt_token_fields,
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
    if model.limits.tgi_strict:
        request = tgi_strict.chat_request(request)
    text = render_openai_chat(request, messages, tools, model)
    prompt_ids = encode_prompt(
        model,
        text,
        "messages",
        add_special_tokens=request.add_special_tokens,
        num_kept=num_kept_tokens(request, model, request.asked_tokens),
    )
    return ChatCall(request, model, text, prompt_ids)


class ChatCall:
    """One chat request; see `handler.contract.Call`."""

    api: Api = "openai"
    done_marker = True

    def __init__(
        self, request: ChatBody, model: ServedModel, text: str, prompt_ids: list[int]
    ) -> None:
        budget = room_for_answer(model, "messages", len(prompt_ids), request.asked_tokens)
        self._request = request
        self._model = model
        self._prompt_ids = prompt_ids
        self._frame = AnswerFrame(model, "chatcmpl-", "chat.completion")
        self.stream = request.stream
        self.sequences: list[Generate] = sequences(
            request,
            model,
            self._frame.id,
            [(prompt_ids, budget)],
            count=request.n,
            logprobs=request.top_logprobs if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs is not None,
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
            **prompt_token_fields(
                self._request, self._prompt_ids, self._transcripts[0], self._model
            ),
        }

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        transcript = self._transcripts[index]
        logprobs = transcript.take_logprobs()
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(logprobs, self._model) if self._request.logprobs else None,
            "finish_reason": self._ended(transcript),
            **self._token_fields(transcript),
        }

    def _token_fields(self, transcript: Transcript) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"token_ids": transcript.take_token_ids()}

    def payloads(self, events: EventSource) -> Iterator[bytes]:
        """The chunks of a stream. Raises ApiError where a sequence fails."""
        head, tail = self._frame.chunk_borders(
            "chat.completion.chunk", usage_asked=self._request.stream_options.include_usage
        )
        role = b'"delta":{"role":"assistant","content":"","refusal":null}'
        first = True
        for index, text in follow(self.api, events, self._transcripts, self.usage):
            if first:  # only now is it certain that there will be an answer
                first = False
                first_tail = b"]" + self._prompt_json() + tail[1:]
                for choice in range(len(self._transcripts)):
                    yield head + _choice(choice, role, b"null", b"null", b"") + first_tail
            transcript = self._transcripts[index]
            logprobs = transcript.take_logprobs() if text or transcript.reason else []
            if text or logprobs:
                delta = b'"delta":{"content":' + json_bytes(text) + b"}"
                tokens = more_fields(self._token_fields(transcript))
                shown = self._logprobs_json(logprobs)
                yield head + _choice(index, delta, shown, b"null", tokens) + tail
            if transcript.reason:
                reason = json_bytes(self._ended(transcript))
                tokens = more_fields(self._token_fields(transcript))
                yield head + _choice(index, b'"delta":{}', b"null", reason, tokens) + tail
        if self._request.stream_options.include_usage:
            usage = json_bytes(usage_body(self.usage.prompt_tokens, self._transcripts))
            yield head + b'],"usage":' + usage + b"}"

    def _prompt_json(self) -> bytes:
        first = self._transcripts[0]
        return more_fields(prompt_token_fields(self._request, self._prompt_ids, first, self._model))

    def _logprobs_json(self, entries: list[TokenLogprob]) -> bytes:
        if not self._request.logprobs:
            return b"null"
        return json_bytes(chat_logprobs(entries, self._model))

    def _ended(self, transcript: Transcript) -> str:
        reason = finish_reason(transcript.reason, self._model)
        self.usage.finish_reasons.append(reason)
        return reason


def _choice(index: int, delta: bytes, logprobs: bytes, reason: bytes, more: bytes) -> bytes:
    form = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}'
    return form % (index, delta, logprobs, reason, more)
