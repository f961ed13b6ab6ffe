"""Every path, its methods, and what answers there. Must not know: how an answer is made."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from flask import Flask, Response, g, request

from container.settings import Settings
from container.version import version
from container.web import documentation
from container.web.answer import Answerer, json_response
from container.web.invocations import Computation, Handlers, Kind, Kinds, tokenizing_by_body
from container.web.readiness import Readiness
from handler.contract import Api, ApiError


@dataclass(frozen=True)
class Choice:
    """How a path chooses its kind of answer."""

    operation: str
    api: Api
    """The shape of errors before the body is known."""
    of_body: Callable[[Any], Kind]


def register(
    app: Flask,
    settings: Settings,
    handlers: Handlers,
    readiness: Readiness,
    answerer: Answerer,
) -> None:
    """Add all routes to the app. The first word of an endpoint names it in the API document."""
    for path, choice in _generation_routes(settings, handlers).items():
        _add_generation(app, path, choice, answerer)
    _add_tokenizing(app, handlers, answerer)
    _add_health(app, readiness)
    _add_information(app, settings, readiness)
    documentation.register(app)


def _generation_routes(settings: Settings, handlers: Handlers) -> dict[str, Choice]:
    kinds = Kinds(handlers)

    def always(kind: Kind) -> Choice:
        return Choice(kind.operation, kind.api, lambda _: kind)

    routes = {
        "/v1/chat/completions": always(kinds.chat),
        "/v1/completions": always(kinds.completions),
        "/generate": always(kinds.generate),
        "/generate_stream": always(kinds.generate_stream),
        "/": always(kinds.compat),
        # A body that cannot be told apart is answered in TGI's shape: it is the shorter one,
        # and no OpenAI client calls this path.
        "/invocations": Choice("invocations", "tgi", kinds.by_body),
    }
    if settings.oai_chat_route is not None:
        routes["/" + settings.oai_chat_route.strip("/")] = always(kinds.chat)
    if settings.messages_api_enabled or settings.invocations_mode == "chat":
        routes["/invocations"] = always(kinds.chat)
    if settings.invocations_mode == "generate":
        routes["/invocations"] = always(kinds.compat)
    return routes


def _add_generation(app: Flask, path: str, choice: Choice, answerer: Answerer) -> None:
    def view() -> Response:
        g.record.api = choice.api
        return answerer.generate(request, g.record, choice.of_body)

    app.add_url_rule(path, f"{choice.operation} {path}", view, methods=["POST"])


def _add_tokenizing(app: Flask, handlers: Handlers, answerer: Answerer) -> None:
    @app.post("/tokenize")
    def tokenize() -> Response:
        return answerer.compute(request, g.record, partial(tokenizing_by_body, handlers))

    @app.post("/chat_tokenize")
    def chat_tokenize() -> Response:
        computation = Computation("tgi", handlers.chat_tokenize)
        return answerer.compute(request, g.record, lambda _: computation)

    @app.post("/detokenize")
    def detokenize() -> Response:
        g.record.api = "openai"
        computation = Computation("openai", handlers.detokenize)
        return answerer.compute(request, g.record, lambda _: computation)


def _add_health(app: Flask, readiness: Readiness) -> None:
    """200 with no body, or 503 with the reason. Waits for nothing."""

    def health() -> Response:
        g.record.is_quiet = True
        reason = readiness.reason()
        if reason is None:
            return Response(status=200)
        payload = {"error": f"The model is not ready: {reason}.", "error_type": "healthcheck"}
        return json_response(payload, 503)

    app.add_url_rule("/ping", "ping", health, methods=["GET", "POST"])
    app.add_url_rule("/health", "health", health, methods=["GET"])
    app.add_url_rule("/", "health /", health, methods=["GET"])


def _add_information(app: Flask, settings: Settings, readiness: Readiness) -> None:
    def described() -> dict[str, Any]:
        name = _served_name(settings, readiness)
        card = readiness.card
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": name,
            "max_model_len": card.max_total_tokens if card else None,
        }

    @app.get("/v1/models")
    def models() -> Response:
        g.record.api = "openai"
        return json_response({"object": "list", "data": [described()]})

    @app.get("/v1/models/<path:name>")
    def model(name: str) -> Response:
        g.record.api = "openai"
        known = described()
        # A folder's name begins with a slash, which is lost where slashes in a path are merged.
        if name.strip("/") not in (known["id"].strip("/"), (settings.model_id or "").strip("/")):
            raise ApiError(
                404,
                f"The model `{name[:100]}` does not exist; this server has `{known['id']}`.",
                param="model",
                code="model_not_found",
            )
        return json_response(known)

    @app.get("/info")
    def info() -> Response:
        return json_response(_information(settings, readiness))


def _served_name(settings: Settings, readiness: Readiness) -> str:
    card = readiness.card
    named = settings.served_model_name or (card.model_id if card else settings.model_id)
    return named or "unknown"


def _information(settings: Settings, readiness: Readiness) -> dict[str, Any]:
    """TGI's keys; then, under names TGI does not use, what a person who debugs wants to see.

    What only a loaded model can tell is null until then.
    """
    card = readiness.card
    return {
        "model_id": card.model_id if card else settings.model_id,
        "model_sha": card.revision if card else settings.revision,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_best_of": settings.max_best_of,
        "max_stop_sequences": settings.max_stop_sequences,
        "max_input_tokens": card.max_input_tokens if card else settings.max_input_tokens,
        "max_total_tokens": card.max_total_tokens if card else settings.max_total_tokens,
        "validation_workers": settings.num_workers,
        "max_client_batch_size": settings.max_client_batch_size,
        "router": "invocant",
        "version": version(),
        "sha": None,
        "docker_label": None,
        "status": readiness.reason() or "ready",
        "model_type": card.model_type if card else None,
        "served_model_name": _served_name(settings, readiness),
        "chat_template": card.chat_templates.get("default") if card else None,
        "chat_template_names": sorted(card.chat_templates) if card else None,
        "chat_template_source": card.chat_template_source if card else None,
        "model_dtype": card.dtype if card else settings.dtype,
        "model_device_type": card.device if card else settings.device,
        "device_name": card.device_name if card else None,
        "attention": card.attention if card else None,
        "kv_capacity_tokens": card.kv_capacity_tokens if card else None,
        "max_batch_size": card.max_batch_size if card else settings.max_batch_size,
        "quantization": card.quantization if card else None,
        "invocations_mode": settings.invocations_mode,
    }
