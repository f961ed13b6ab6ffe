"""The real handlers, as the web layer calls them. Must not know: HTTP."""

from typing import Any

from container.settings import Settings
from container.version import version
from container.web.invocations import Handlers
from handler import chat, completions, generate, tokenize
from handler.contract import Call
from handler.runner.protocol import ModelCard
from handler.served_model import ServedModel, ServingLimits


def real_handlers() -> Handlers:
    """The handlers that the server runs with."""
    return Handlers(
        build_model=_build_model,
        chat=chat.parse,
        completions=completions.parse,
        generate=_generate,
        generate_stream=_generate_stream,
        compat=_compat,
        tokenize=tokenize.tokenize,
        chat_tokenize=tokenize.chat_tokenize,
        vllm_tokenize=tokenize.vllm_tokenize,
        detokenize=tokenize.detokenize,
    )


def _build_model(card: ModelCard, settings: Settings) -> ServedModel:
    limits = ServingLimits(
        version=version(),
        served_model_name=settings.served_model_name,
        max_best_of=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_top_n_tokens=settings.max_top_n_tokens,
        max_client_batch_size=settings.max_client_batch_size,
        tgi_strict=settings.tgi_strict,
    )
    return ServedModel(card, limits)


def _generate(body: Any, model: ServedModel) -> Call:
    return generate.parse(body, model, compat=False, stream=False)


def _generate_stream(body: Any, model: ServedModel) -> Call:
    return generate.parse(body, model, compat=False, stream=True)


def _compat(body: Any, model: ServedModel) -> Call:
    return generate.parse(body, model, compat=True, stream=None)
