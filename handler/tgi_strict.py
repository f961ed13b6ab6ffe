"""TGI's habits on `/v1`, for clients that depend on them (`--tgi-strict`).

Each is that of text-generation-inference 3.3.7, and a fault against OpenAI's reference.

Must not know: TGI's own routes, events, HTTP.
"""

from typing import TypeVar

from handler.schema.openai import ChatBody, GenerationFields
from handler.schema.validation import refusal
from handler.token_events import FINISH_REASONS
from handler.transcript import EndReason

Request = TypeVar("Request", bound=GenerationFields)

UNENDED = b'""'
"""The finish reason, as JSON, in a completion's chunks before the last."""


def kept_stops(request: Request) -> Request:
    """The request with its stop strings left in the text, unless it says itself what it wants."""
    if "include_stop_str_in_output" in request.model_fields_set:
        return request
    return request.model_copy(update={"include_stop_str_in_output": True})


def chat_request(request: ChatBody) -> ChatBody:
    """The same, and a given `presence_penalty` p as a `repetition_penalty` of p + 2.

    Raises ApiError (400) where that is not above 0.
    """
    request = kept_stops(request)
    if "presence_penalty" not in request.model_fields_set:
        return request
    repetition_penalty = request.presence_penalty + 2
    if repetition_penalty <= 0:
        sentence = "`presence_penalty` must be above -2 with --tgi-strict"
        raise refusal("openai", "presence_penalty", sentence)
    changes = {"presence_penalty": 0.0, "repetition_penalty": repetition_penalty}
    return request.model_copy(update=changes)


def finish_reason(reason: EndReason) -> str:
    """How a chat, or a completion in one piece, ends: "stop" at an end token."""
    return "stop" if FINISH_REASONS[reason] == "eos_token" else FINISH_REASONS[reason]


def streamed_reason(reason: EndReason) -> str:
    """How a stream of completions ends: in the words of TGI's own routes."""
    return FINISH_REASONS[reason]
