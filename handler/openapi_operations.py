"""What can be asked of the server: each operation's body, answer, errors and examples.

Must not know: which paths there are, how any of it is answered.
"""

from dataclasses import dataclass, field
from typing import Any

from handler.contract import Api
from handler.schema.openai import ChatBody, CompletionBody
from handler.schema.tgi import GenerateBody, TokenizeBody
from handler.schema.validation import RequestBody
from handler.schema.vllm import DetokenizeBody, TokenizeChatBody, TokenizeTextBody

_CHAT = {"messages": [{"role": "user", "content": "What is deep learning?"}], "max_tokens": 64}
_COMPLETION = {"prompt": "Deep learning is", "max_tokens": 32}
_GENERATE = {"inputs": "Deep learning is", "parameters": {"max_new_tokens": 32}}


@dataclass(frozen=True)
class Operation:
    """One thing a route can do. `answers` and `events` name schemas of `openapi_answers`."""

    summary: str
    apis: tuple[Api, ...] = ()
    """Whose error shapes the answers of 4xx and 5xx have; none where there are no errors."""
    bodies: tuple[type[RequestBody], ...] = ()
    examples: dict[str, Any] = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    """What each server-sent event holds, where the answer is or may be a stream."""
    outcome: str = "The answer."
    may_miss: bool = False
    """Whether a 4xx is possible without a body: what the path names may not exist."""
    is_page: bool = False


_STREAMED = "The answer; with `stream` a stream of server-sent events"

OPERATIONS: dict[str, Operation] = {
    "chat": Operation(
        "Continue a conversation (OpenAI).",
        ("openai",),
        (ChatBody,),
        {"chat": _CHAT},
        ("ChatAnswer",),
        ("ChatChunk", "OpenAIError"),
        f"{_STREAMED} and `data: [DONE]`.",
    ),
    "completions": Operation(
        "Continue a text (OpenAI).",
        ("openai",),
        (CompletionBody,),
        {"completion": _COMPLETION},
        ("CompletionAnswer",),
        ("CompletionChunk", "OpenAIError"),
        f"{_STREAMED} and `data: [DONE]`.",
    ),
    "generate": Operation(
        "Continue a text (TGI).",
        ("tgi",),
        (GenerateBody,),
        {"generate": _GENERATE},
        ("GenerateAnswer",),
    ),
    "generate_stream": Operation(
        "Continue a text, one server-sent event per token (TGI).",
        ("tgi",),
        (GenerateBody,),
        {"generate": _GENERATE},
        events=("TokenEvent", "TgiError"),
        outcome="A stream of server-sent events.",
    ),
    "compat": Operation(
        "Continue a text; the answer is a list of one (TGI).",
        ("tgi",),
        (GenerateBody,),
        {"generate": _GENERATE},
        ("GenerateAnswers",),
        ("TokenEvent", "TgiError"),
        f"{_STREAMED}.",
    ),
    "invocations": Operation(
        "SageMaker's route: the body chooses the API, by `inputs`, `messages` or `prompt`.",
        ("openai", "tgi"),
        (ChatBody, CompletionBody, GenerateBody),
        {"chat": _CHAT, "completion": _COMPLETION, "generate": _GENERATE},
        ("ChatAnswer", "CompletionAnswer", "GenerateAnswers"),
        ("ChatChunk", "CompletionChunk", "TokenEvent", "OpenAIError", "TgiError"),
        f"{_STREAMED}, in the form of the API that the body chose.",
    ),
    "tokenize": Operation(
        "The tokens of a text, as TGI (`inputs`) or vLLM (`prompt`, `messages`) lists them.",
        ("openai", "tgi"),
        (TokenizeBody, TokenizeTextBody, TokenizeChatBody),
        {"TGI": {"inputs": "Deep learning is"}, "vLLM": {"prompt": "Deep learning is"}},
        ("TokenList", "TokenIds"),
    ),
    "detokenize": Operation(
        "The text of tokens (vLLM).",
        ("openai",),
        (DetokenizeBody,),
        {"tokens": {"tokens": [42, 43]}},
        ("DetokenizedText",),
    ),
    "chat_tokenize": Operation(
        "A conversation as the text the model reads, and its tokens (TGI).",
        ("tgi",),
        (ChatBody,),
        {"chat": _CHAT},
        ("ChatTokens",),
    ),
    "models": Operation("The one model this server has (OpenAI).", answers=("ModelList",)),
    "model": Operation(
        "The model by its name (OpenAI).", ("openai",), answers=("Model",), may_miss=True
    ),
    "info": Operation("What is served, and within which limits (TGI).", answers=("Info",)),
    "ping": Operation("SageMaker's health check.", ("tgi",), outcome="The model answers; no body."),
    "health": Operation("Health check.", ("tgi",), outcome="The model answers; no body."),
    "openapi": Operation("This document.", answers=("Document",)),
    "docs": Operation("This document as a page.", outcome="The page.", is_page=True),
}
