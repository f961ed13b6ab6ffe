"""What chat and completions share: from OpenAI's fields to sequences, from transcripts to JSON.

Must not know: chat templates, prompts, TGI's routes.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from handler import tgi_strict
from handler.failures import NotText, PromptTooLong, long_answer, long_prompt
from handler.runner.protocol import Generate, Sampling
from handler.schema.openai import GenerationFields, check_token_ids, read_logit_bias
from handler.schema.validation import bad_value, refusal
from handler.served_model import ServedModel
from handler.stop_strings import StopStrings
from handler.transcript import EndReason, TextOptions, TokenLogprob, Transcript

SEED_MODULUS = 2**64

json_bytes = msgspec.json.Encoder().encode


def num_kept_tokens(request: GenerationFields, model: ServedModel, asked: int | None) -> int | None:
    """How many of a prompt's last tokens are read; None for all. Raises ApiError (400)."""
    wanted, limit = request.truncate_prompt_tokens, model.card.max_input_tokens
    if wanted is None:
        return None
    if wanted > limit:
        accepted = f"at most {limit}, what this model can read, or -1 for as many as fit"
        raise bad_value("openai", "truncate_prompt_tokens", accepted, wanted)
    if wanted > 0:
        return wanted
    # Beside an answer that fills the context alone nothing fits; that is said elsewhere.
    return max(1, min(limit, model.card.max_total_tokens - (asked or 1)))


def encode_prompt(
    model: ServedModel, text: str, part: str, *, add_special_tokens: bool, num_kept: int | None
) -> list[int]:
    """Token ids of a prompt, the last `num_kept` of them where that is given.

    `part` is what errors call it: "messages" or "prompt".
    """
    try:
        ids = model.encode(
            text, add_special_tokens=add_special_tokens, may_overflow=num_kept is not None
        )
        return ids if num_kept is None else ids[-num_kept:]
    except PromptTooLong as error:
        size = f"hold {error.num_characters} characters, more than so many tokens can be"
        raise long_prompt(part, model.card, size) from error
    except NotText as error:
        sentence = f"`{part}` holds half of a surrogate pair (\\ud800 to \\udfff), which is no text"
        raise refusal("openai", part, sentence) from error


def room_for_answer(
    model: ServedModel, part: str, num_prompt_tokens: int, asked: int | None
) -> int:
    """The token budget: what was asked for, or the rest of the context. Raises ApiError."""
    card = model.card
    room = card.max_total_tokens - num_prompt_tokens
    if num_prompt_tokens > card.max_input_tokens or room < 1:
        raise long_prompt(part, card, f"resulted in {num_prompt_tokens} tokens")
    if asked is not None and asked > room:
        raise long_answer(part, card, num_prompt_tokens, asked)
    return room if asked is None else asked


def sequences(
    request: GenerationFields,
    model: ServedModel,
    call_id: str,
    prompts: Iterable[tuple[list[int], int]],
    *,
    count: int,
    logprobs: int | None,
    prompt_logprobs: bool = False,
) -> list[Generate]:
    """`count` sequences for each `(prompt ids, token budget)`, in the order of the prompts."""
    vocab_size = model.card.vocab_size
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    bias = read_logit_bias(request.logit_bias, vocab_size)
    stop_token_ids = [*request.stop_token_ids, *_special_stops(request, model)]
    made: list[Generate] = []
    for prompt_ids, max_new_tokens in prompts:
        if request.min_tokens > max_new_tokens:
            sentence = f"`min_tokens` is more than the {max_new_tokens} tokens there may be"
            raise refusal("openai", "min_tokens", sentence)
        made.extend(
            Generate(
                request_id=f"{call_id}-{len(made) + choice}",
                prompt_ids=prompt_ids,
                max_new_tokens=max_new_tokens,
                sampling=_sampling(request, bias, choice, vocab_size),
                stop_token_ids=stop_token_ids,
                ignore_eos=request.ignore_eos,
                min_tokens=request.min_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            for choice in range(count)
        )
    return made


def _sampling(
    request: GenerationFields, bias: dict[int, float], choice: int, vocab_size: int
) -> Sampling:
    temperature = request.temperature
    if temperature is None:
        temperature = 0.0 if request.do_sample is False else 1.0
    seed = request.seed
    if seed is not None and choice:
        # The choices of one request differ, and each is the same the next time.
        seed = (seed + choice) % SEED_MODULUS
    return Sampling(
        temperature=temperature,
        # More than all tokens is all of them; the number may not fit the runner's integers.
        top_k=min(max(request.top_k, 0), vocab_size),
        top_p=request.top_p,
        min_p=request.min_p,
        typical_p=request.typical_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=bias,
        seed=seed,
    )


def _special_stops(request: GenerationFields, model: ServedModel) -> list[int]:
    """Ids of stop strings that name a special token, which never shows in the text."""
    ids = (model.tokenizer.token_to_id(stop) for stop in request.stop)
    return [id_ for id_ in ids if id_ in model.vocabulary.special_token_ids]


def text_options(
    request: GenerationFields, model: ServedModel, *, silent: bool = False
) -> TextOptions:
    """How the tokens of this request become text."""
    end_ids = {*request.stop_token_ids, *_special_stops(request, model)}
    if not request.ignore_eos:
        end_ids.update(model.card.eos_token_ids)
    return TextOptions(
        end_token_ids=frozenset(end_ids),
        stops=StopStrings(request.stop) if request.stop else None,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        min_tokens=request.min_tokens,
        silent=silent,
    )


def finish_reason(reason: EndReason | None, model: ServedModel) -> str:
    """OpenAI's word for the end of a sequence, or TGI's where its habits are kept."""
    if reason is not None and model.limits.tgi_strict:
        return tgi_strict.finish_reason(reason)
    return "length" if reason == "length" else "stop"


def usage_body(prompt_tokens: int, transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """OpenAI's `usage`; the prompt counts once, however many choices it has."""
    completion_tokens = sum(transcript.num_tokens for transcript in transcripts)
    cached_tokens = min(max(transcript.cached_tokens for transcript in transcripts), prompt_tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class AnswerFrame:
    """The parts that every chunk of an answer, and the plain answer, have in common."""

    def __init__(self, model: ServedModel, prefix: str, kind: str) -> None:
        self.id = prefix + uuid.uuid4().hex
        self.fields = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }

    def chunk_borders(self, kind: str, *, usage_asked: bool) -> tuple[bytes, bytes]:
        """What stands before and after a choice in each chunk: built once, JSON already."""
        head = json_bytes({**self.fields, "object": kind})[:-1] + b',"choices":['
        return head, b'],"usage":null}' if usage_asked else b"]}"


def chat_logprobs(entries: Iterable[TokenLogprob], model: ServedModel) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat choice."""
    return {
        "content": [
            {
                **_logprob_entry(entry.token_id, entry.logprob, model),
                "top_logprobs": [_logprob_entry(*top, model) for top in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_token_fields(
    request: GenerationFields, prompt_ids: list[int], transcript: Transcript, model: ServedModel
) -> dict[str, Any]:
    """What vLLM's fields ask to be told of the prompt's tokens.

    The runner does not know the rank of a token, which vLLM's type allows to be null.
    """
    fields: dict[str, Any] = {}
    if request.return_token_ids:
        fields["prompt_token_ids"] = prompt_ids
    if request.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [
            None if value is None else _prompt_logprob_entry(token_id, value, model)
            for token_id, value in zip(prompt_ids, transcript.prompt_logprobs, strict=True)
        ]
    return fields


def _prompt_logprob_entry(token_id: int, logprob: float, model: ServedModel) -> dict[str, Any]:
    token = model.vocabulary.token_text(token_id)
    return {str(token_id): {"logprob": logprob, "rank": None, "decoded_token": token}}


def more_fields(fields: dict[str, Any]) -> bytes:
    """The fields as they follow others in a JSON object that is being written."""
    return b"," + json_bytes(fields)[1:-1] if fields else b""


def _logprob_entry(token_id: int, logprob: float, model: ServedModel) -> dict[str, Any]:
    token = model.vocabulary.token_bytes(token_id)
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}
