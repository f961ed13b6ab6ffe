"""TGI's generate: text in, text out, on `/generate`, `/generate_stream`, `/` and `/invocations`.

The wire is that of text-generation-inference 3.3.7: stop strings stay in the text, and a stream
has one event per token, of which the last carries the whole text.

Must not know: Flask, the socket, chat, OpenAI.
"""

import secrets
from collections.abc import Iterator
from typing import Any

from handler.contract import Api, EventSource, Usage
from handler.failures import NotText, PromptTooLong
from handler.runner.protocol import Generate, Sampling
from handler.schema.tgi import GenerateBody, Parameters, read_generate
from handler.schema.validation import refusal
from handler.served_model import ServedModel
from handler.stop_strings import StopStrings
from handler.token_events import TokenEvent, TokenReader, event_json
from handler.transcript import follow

ADMITTED_NEW_TOKENS = 1024
"""TGI admits a request if so many tokens fit, and ends it with `length` where the context does."""
SEED_BITS = 53
"""Seeds we draw can be repeated by clients whose numbers are doubles, such as JavaScript's."""


def parse(body: Any, model: ServedModel, *, compat: bool, stream: bool | None) -> "GenerateCall":
    """Read a generate request. Raises ApiError (422) that names the field at fault.

    `compat`: the form of `/` and `/invocations`, which answers a list of one and repeats the
    prompt unless told otherwise. `stream`: what the route forces; None leaves it to the body.
    """
    request = read_generate(body, model.limits, stream=stream)
    prompt_ids = _encode(request, model)
    budget = _token_budget(request.parameters, model, len(prompt_ids))
    return GenerateCall(request, model, prompt_ids, budget, compat=compat)


def _encode(request: GenerateBody, model: ServedModel) -> list[int]:
    truncate = request.parameters.truncate
    limit = model.card.max_input_tokens
    if truncate is not None and not 0 < truncate <= limit:
        sentence = f"`truncate` must be strictly positive and less than {limit}. Given: {truncate}"
        raise refusal("tgi", "truncate", sentence)
    try:
        ids = model.encode(
            request.inputs, add_special_tokens=True, may_overflow=truncate is not None
        )
    except PromptTooLong as error:
        sentence = f"`inputs` must have less than {limit} tokens. Given: {error.num_characters}"
        raise refusal("tgi", "inputs", f"{sentence} characters") from error
    except NotText as error:
        sentence = "`inputs` holds half of a surrogate pair (\\ud800 to \\udfff), which is no text"
        raise refusal("tgi", "inputs", sentence) from error
    if not ids:
        raise refusal("tgi", "inputs", "`inputs` has no tokens")
    return ids if truncate is None else ids[-truncate:]


def _token_budget(parameters: Parameters, model: ServedModel, num_prompt_tokens: int) -> int:
    card, asked = model.card, parameters.max_new_tokens
    room = card.max_total_tokens - num_prompt_tokens
    if asked is not None and min(asked, ADMITTED_NEW_TOKENS) > room:
        sentence = (
            f"`inputs` tokens + `max_new_tokens` must be <= {card.max_total_tokens}. Given: "
            f"{num_prompt_tokens} `inputs` tokens and {asked} `max_new_tokens`"
        )
        raise refusal("tgi", "max_new_tokens", sentence)
    if num_prompt_tokens > card.max_input_tokens or room < 1:
        sentence = f"`inputs` must have less than {card.max_input_tokens} tokens"
        raise refusal("tgi", "inputs", f"{sentence}. Given: {num_prompt_tokens}")
    return room if asked is None else min(asked, room)


class GenerateCall:
    """One generate request; see `handler.contract.Call`."""

    api: Api = "tgi"
    done_marker = False

    def __init__(
        self,
        request: GenerateBody,
        model: ServedModel,
        prompt_ids: list[int],
        budget: int,
        *,
        compat: bool,
    ) -> None:
        parameters = request.parameters
        self._model = model
        self._parameters = parameters
        self._prompt_ids = prompt_ids
        self._compat = compat
        full_text = parameters.return_full_text
        self._full_text = compat if full_text is None else full_text
        self._inputs = request.inputs
        self._details = parameters.details or parameters.decoder_input_details
        self.stream = request.stream
        self.sequences = self._sequences(budget)
        self.usage = Usage(prompt_tokens=len(prompt_ids), prompt_characters=len(request.inputs))
        stops = StopStrings(parameters.stop) if parameters.stop else None
        self._readers = [TokenReader(model, stops, budget) for _ in self.sequences]

    def _sequences(self, budget: int) -> list[Generate]:
        parameters = self._parameters
        # A stream's events show each token's log-probability, best_of compares them.
        shows_tokens = self._details or self.stream or parameters.best_of > 1
        call_id = secrets.token_hex(16)
        return [
            Generate(
                request_id=f"{call_id}-{place}",
                prompt_ids=self._prompt_ids,
                max_new_tokens=budget,
                sampling=_sampling(parameters, self._model.card.vocab_size),
                logprobs=parameters.top_n_tokens if shows_tokens else None,
                prompt_logprobs=parameters.decoder_input_details,
            )
            for place in range(max(parameters.best_of, 1))
        ]

    def collect(self, events: EventSource) -> Any:
        """The plain answer. Raises ApiError where a sequence fails."""
        tokens: list[list[TokenEvent]] = [[] for _ in self._readers]
        for index, released in follow(self.api, events, self._readers, self.usage):
            if self._details:
                tokens[index] += released
        best, *losers = sorted(
            range(len(self._readers)), key=lambda index: -self._readers[index].mean_logprob
        )
        self.usage.finish_reasons.append(self._readers[best].finish_reason)
        body: dict[str, Any] = {"generated_text": self._text(best)}
        if self._details:
            details = self._all_details(best, tokens[best])
            if losers:
                details["best_of_sequences"] = [
                    {"generated_text": self._text(index), **self._all_details(index, tokens[index])}
                    for index in losers
                ]
            body["details"] = details
        return [body] if self._compat else body

    def _text(self, index: int) -> str:
        text = self._readers[index].text
        return self._inputs + text if self._full_text else text

    def _ending(self, index: int) -> dict[str, Any]:
        return {
            "finish_reason": self._readers[index].finish_reason,
            "generated_tokens": self._readers[index].num_tokens,
            "seed": self.sequences[index].sampling.seed,
        }

    def _all_details(self, index: int, tokens: list[TokenEvent]) -> dict[str, Any]:
        details = {
            **self._ending(index),
            "prefill": self._prefill(index),
            "tokens": [token.fields for token in tokens],
        }
        if self._parameters.top_n_tokens:
            details["top_tokens"] = [token.top_tokens for token in tokens]
        return details

    def _prefill(self, index: int) -> list[dict[str, Any]]:
        text_of = self._model.vocabulary.token_text
        return [
            {"id": token_id, "text": text_of(token_id), "logprob": logprob}
            for token_id, logprob in zip(
                self._prompt_ids, self._readers[index].prompt_logprobs, strict=False
            )
        ]

    def payloads(self, events: EventSource) -> Iterator[bytes]:
        """One event per token; the last has the whole text. Raises ApiError where it fails."""
        (reader,) = self._readers
        shows_top = self._parameters.top_n_tokens > 0
        for _, released in follow(self.api, events, self._readers, self.usage):
            if reader.reason is None:
                for token in released:
                    yield event_json(token, None, None, shows_top=shows_top)
                continue
            *earlier, last = released or [reader.closing_event()]
            for token in earlier:
                yield event_json(token, None, None, shows_top=shows_top)
            self.usage.finish_reasons.append(reader.finish_reason)
            details = {**self._ending(0), "input_length": len(self._prompt_ids)}
            yield event_json(
                last, self._text(0), details if self._details else None, shows_top=shows_top
            )


def _sampling(parameters: Parameters, vocab_size: int) -> Sampling:
    if not parameters.samples:
        return Sampling(
            temperature=0.0,
            repetition_penalty=parameters.repetition_penalty,
            frequency_penalty=parameters.frequency_penalty,
        )
    seed = parameters.seed
    return Sampling(
        temperature=parameters.temperature or 1.0,
        top_k=min(parameters.top_k or 0, vocab_size),  # as a number it may be too big
        top_p=parameters.top_p,
        typical_p=parameters.typical_p,
        repetition_penalty=parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty,
        # Drawn here and not in the runner, because the answer names it whatever ends the text.
        seed=secrets.randbits(SEED_BITS) if seed is None else seed,
    )
