"""Which handler answers: the table of handlers, and the choices made by the body.

`/invocations` has TGI's order since 2.4: `inputs`, then `messages`, then `prompt`. Must not know:
HTTP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from container.settings import Settings
from handler.contract import Api, ApiError, Call
from handler.runner.protocol import ModelCard

Parse = Callable[[Any, Any], Call]
"""`(decoded body, served model) -> Call`; raises ApiError 4xx."""
Compute = Callable[[Any, Any], Any]
"""`(decoded body, served model) -> JSON answer`, without the runner; raises ApiError 4xx."""

NEEDED = (
    "`inputs` (a string; TGI's generate API),"
    " `messages` (an array; OpenAI's chat API)"
    " or `prompt` (a string; OpenAI's completions API)"
)


@dataclass(frozen=True)
class Handlers:
    """What requests mean. The real ones come from `real_handlers`; tests bring their own."""

    build_model: Callable[[ModelCard, Settings], Any]
    """The served model that the others are given; may take a second."""
    chat: Parse
    completions: Parse
    generate: Parse
    generate_stream: Parse
    compat: Parse
    tokenize: Compute
    chat_tokenize: Compute
    vllm_tokenize: Compute
    detokenize: Compute


@dataclass(frozen=True)
class Kind:
    """One way of answering: a parser, and whose error shape its clients understand."""

    operation: str
    """Its name in the API document."""
    api: Api
    parse: Parse


@dataclass(frozen=True)
class Computation:
    """An answer that needs no runner, and whose error shape its clients understand."""

    api: Api
    work: Compute


def tokenizing_by_body(handlers: Handlers, body: Any) -> Computation:
    """TGI's form of `/tokenize`, or vLLM's where only vLLM's fields are given."""
    if isinstance(body, dict) and "inputs" not in body and ("prompt" in body or "messages" in body):
        return Computation("openai", handlers.vllm_tokenize)
    return Computation("tgi", handlers.tokenize)


class Kinds:
    """The kinds of generation this server offers."""

    def __init__(self, handlers: Handlers) -> None:
        self.chat = Kind("chat", "openai", handlers.chat)
        self.completions = Kind("completions", "openai", handlers.completions)
        self.generate = Kind("generate", "tgi", handlers.generate)
        self.generate_stream = Kind("generate_stream", "tgi", handlers.generate_stream)
        self.compat = Kind("compat", "tgi", handlers.compat)

    def by_body(self, body: Any) -> Kind:
        """The kind that a body sent to `/invocations` asks for. Raises ApiError 422."""
        if not isinstance(body, dict):
            raise ApiError(422, f"The request body must be a JSON object with {NEEDED}.")
        if "inputs" in body:
            return self.compat
        if "messages" in body:
            return self.chat
        if "prompt" in body:
            return self.completions
        raise ApiError(422, f"The request body must have {NEEDED}; it has {_keys(body)}.")


def _keys(body: dict[str, Any]) -> str:
    names = [f"`{key[:40]}`" for key in list(body)[:8]]
    return ", ".join(names) if names else "no key at all"
