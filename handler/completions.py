"""`POST /v1/completions`: prompts in, continuations or a stream of chunks out.

Must not know: Flask, the socket, chat templates, TGI.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from handler import tgi_strict
from handler.contract import Api, EventSource, Usage
from handler.openai_generation import (
    AnswerFrame,
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
from handler.schema.openai import (
    MAX_CHOICES,
    CompletionBody,
    Prompt,
    check_token_ids,
    read_completion,
)
from handler.schema.validation import refusal
from handler.served_model import ServedModel
from handler.transcript import TokenLogprob, Transcript, follow


def parse(body: Any, model: ServedModel) -> "CompletionCall":
    """Read a completion request. Raises ApiError (400) that names the field at fault."""
    request, prompts = read_completion(body)
    if model.limits.tgi_strict:
        request = tgi_strict.kept_stops(request)
    _check_counts(request, len(prompts), model)
    num_kept = num_kept_tokens(request, model, request.max_tokens)
    tokenised = [_tokenised(request, model, prompt, num_kept) for prompt in prompts]
    return CompletionCall(request, model, tokenised)


def _check_counts(request: CompletionBody, num_prompts: int, model: ServedModel) -> None:
    limit = model.limits.max_client_batch_size
    if num_prompts > limit:
        sentence = f"`prompt` may hold up to {limit} prompts, not {num_prompts}"
        raise refusal("openai", "prompt", sentence)
    best_of = request.best_of or request.n
    if best_of < request.n:
        raise refusal("openai", "best_of", f"`best_of` must be at least `n`, which is {request.n}")
    if best_of > request.n and request.stream:
        raise refusal("openai", "best_of", "`best_of` above `n` is not possible with `stream`")
    if best_of * num_prompts > MAX_CHOICES:
        sentence = f"prompts times `n` (or `best_of`) must be at most {MAX_CHOICES}"
        raise refusal("openai", "best_of" if request.best_of else "n", sentence)


@dataclass(frozen=True)
class _Tokenised:
    """A prompt in both forms."""

    text: str
    ids: list[int]


def _tokenised(
    request: CompletionBody, model: ServedModel, prompt: Prompt, num_kept: int | None
) -> _Tokenised:
    if isinstance(prompt, str):
        adds = request.add_special_tokens
        ids = encode_prompt(model, prompt, "prompt", add_special_tokens=adds, num_kept=num_kept)
        if num_kept is None or not ids or not request.echo:
            return _Tokenised(prompt, ids or _begin(model))
    else:
        check_token_ids("prompt", prompt, model.card.vocab_size)
        ids = prompt if num_kept is None else prompt[-num_kept:]
    # Ids are text only where the answer repeats them.
    text = model.tokenizer.decode(ids, skip_special_tokens=True) if request.echo else ""
    return _Tokenised(text, ids)


def _begin(model: ServedModel) -> list[int]:
    """What an empty prompt stands for: the beginning of a text."""
    bos = model.card.special_tokens.get("bos_token")
    bos_id = model.tokenizer.token_to_id(bos) if bos else None
    if bos_id is None:
        sentence = "`prompt` is empty, and this model has no token to begin a text with"
        raise refusal("openai", "prompt", sentence)
    return [bos_id]


class CompletionCall:
    """One completion request; see `handler.contract.Call`."""

    api: Api = "openai"
    done_marker = True

    def __init__(
        self, request: CompletionBody, model: ServedModel, prompts: list[_Tokenised]
    ) -> None:
        self._model = model
        self._n = request.n
        self._best_of = request.best_of or request.n
        self._wants_usage = request.stream_options.include_usage
        self._frame = AnswerFrame(model, "cmpl-", "text_completion")
        self.stream = request.stream
        self.usage = Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            prompt_characters=sum(len(prompt.text) for prompt in prompts),
        )
        # Each sequence produces a token at least; with 0 asked for it is not looked at.
        asked = max(request.max_tokens, 1)
        ranks = self._best_of > self._n
        self.sequences: list[Generate] = sequences(
            request,
            model,
            self._frame.id,
            [(p.ids, room_for_answer(model, "prompt", len(p.ids), asked)) for p in prompts],
            count=self._best_of,
            logprobs=0 if ranks and request.logprobs is None else request.logprobs,
            prompt_logprobs=request.prompt_logprobs is not None
            or (request.echo and request.logprobs is not None),
        )
        options = text_options(request, model, silent=request.max_tokens == 0)
        self._choices = [
            _Choice(request, model, prompt, Transcript(model.vocabulary, options))
            for prompt in prompts
            for _ in range(self._best_of)
        ]
        self._transcripts = [choice.transcript for choice in self._choices]

    def collect(self, events: EventSource) -> dict[str, Any]:
        """The plain answer. Raises ApiError where a sequence fails."""
        texts = [""] * len(self._choices)
        for index, text in follow(self.api, events, self._transcripts, self.usage):
            texts[index] += text
        return {
            **self._frame.fields,
            "choices": [
                self._choices[chosen].body(index, texts[chosen], self._ended(chosen))
                for index, chosen in enumerate(self._chosen())
            ],
            "usage": usage_body(self.usage.prompt_tokens, self._transcripts),
        }

    def _chosen(self) -> list[int]:
        """The sequences that are answered: of each prompt's `best_of` the `n` most likely."""
        chosen: list[int] = []
        for start in range(0, len(self._choices), self._best_of):
            candidates = range(start, start + self._best_of)
            ranked = sorted(candidates, key=lambda index: -self._transcripts[index].mean_logprob)
            chosen += ranked[: self._n] if self._best_of > self._n else candidates
        return chosen

    def payloads(self, events: EventSource) -> Iterator[bytes]:
        """The chunks of a stream. Raises ApiError where a sequence fails."""
        head, tail = self._frame.chunk_borders("text_completion", usage_asked=self._wants_usage)
        for index, text in follow(self.api, events, self._transcripts, self.usage):
            choice = self._choices[index]
            if text or choice.transcript.reason:
                part = choice.stream_part(index, text)
                if part is not None:
                    yield head + part + tail
            if choice.transcript.reason:
                reason = json_bytes(self._ended(index))
                tokens = more_fields(choice.token_fields())
                yield head + _part(index, b'""', b"null", reason, tokens) + tail
        if self._wants_usage:
            usage = json_bytes(usage_body(self.usage.prompt_tokens, self._transcripts))
            yield head + b'],"usage":' + usage + b"}"

    def _ended(self, index: int) -> str:
        ended = self._transcripts[index].reason
        reason = finish_reason(ended, self._model)
        if ended is not None and self.stream and self._model.limits.tgi_strict:
            reason = tgi_strict.streamed_reason(ended)
        self.usage.finish_reasons.append(reason)
        return reason


class _Choice:
    """One choice as it grows: its text, and the log-probabilities with their offsets in it."""

    def __init__(
        self,
        request: CompletionBody,
        model: ServedModel,
        prompt: _Tokenised,
        transcript: Transcript,
    ) -> None:
        self.transcript = transcript
        self._request = request
        self._model = model
        self._prompt = prompt
        self._prompt_fields_are_due = True
        self._echo_is_due = request.echo
        self._wants_logprobs = request.logprobs is not None
        self._offset = 0

    def body(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """The choice of a plain answer."""
        text, logprobs = self._echoed(text)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            **self.token_fields(),
        }

    def token_fields(self) -> dict[str, Any]:
        """What vLLM's fields ask of the tokens since the last call; of the prompt's once."""
        fields: dict[str, Any] = {}
        if self._prompt_fields_are_due:
            self._prompt_fields_are_due = False
            fields = prompt_token_fields(
                self._request, self._prompt.ids, self.transcript, self._model
            )
        if self._request.return_token_ids:
            fields["token_ids"] = self.transcript.take_token_ids()
        return fields

    def stream_part(self, index: int, text: str) -> bytes | None:
        """The choice of a chunk that carries text; None where there is nothing to carry."""
        text, logprobs = self._echoed(text)
        if not text and not (logprobs and logprobs["tokens"]):
            return None
        tokens = more_fields(self.token_fields())
        unended = tgi_strict.UNENDED if self._model.limits.tgi_strict else b"null"
        return _part(index, json_bytes(text), json_bytes(logprobs), unended, tokens)

    def _echoed(self, text: str) -> tuple[str, dict[str, Any] | None]:
        """The text and its log-probabilities, after those of the prompt where they are due."""
        logprobs = _LegacyLogprobs(self._model, self._offset)
        if self._echo_is_due:
            self._echo_is_due = False
            text = self._prompt.text + text
            # Without the prompt's log-probabilities there was no wish for any.
            for token_id, value in zip(
                self._prompt.ids, self.transcript.prompt_logprobs, strict=False
            ):
                logprobs.add_prompt_token(token_id, value)
        for entry in self.transcript.take_logprobs():
            logprobs.add(entry)
        self._offset = logprobs.offset
        return text, logprobs.fields if self._wants_logprobs else None


class _LegacyLogprobs:
    """OpenAI's `logprobs` of a completion: parallel lists, and offsets into the text."""

    def __init__(self, model: ServedModel, offset: int) -> None:
        self._text_of = model.vocabulary.token_text
        self.offset = offset
        self.fields: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add(self, entry: TokenLogprob) -> None:
        top = {self._text_of(token_id): value for token_id, value in entry.top}
        token = self._text_of(entry.token_id)
        # The chosen token is always among them, as a further one where it was less likely.
        self._add(token, entry.logprob, {**top, token: entry.logprob})

    def add_prompt_token(self, token_id: int, logprob: float | None) -> None:
        token = self._text_of(token_id)
        self._add(token, logprob, None if logprob is None else {token: logprob})

    def _add(self, token: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self.fields["tokens"].append(token)
        self.fields["token_logprobs"].append(logprob)
        self.fields["top_logprobs"].append(top)
        self.fields["text_offset"].append(self.offset)
        self.offset += len(token)


def _part(index: int, text: bytes, logprobs: bytes, reason: bytes, more: bytes) -> bytes:
    form = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
    return form % (index, text, logprobs, reason, more)
