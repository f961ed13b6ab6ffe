"""From a request to its answer: body, parse, submit, then a JSON body or a stream.

Must not know: which route was asked, what the handlers mean.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from flask import Request, Response

from container.settings import Settings
from container.web import body, errors
from container.web.access import Record
from container.web.guard import Guard
from container.web.hang_up import HangUpWatch
from container.web.invocations import Computation, Kind
from container.web.stream import EventStream
from handler.contract import ApiError, Call, Usage
from handler.runner.client import Generation, GenerationClosedError, RunnerClient
from handler.runner.protocol import ModelCard

JSON = "application/json"
_NAMES_A_MODEL = ("X-Amzn-SageMaker-Adapter-Identifier", "X-Amzn-SageMaker-Target-Model")
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9_.]+")


class Model(Protocol):
    """What this layer needs of the served model; the handlers know the rest."""

    card: ModelCard


class Readiness(Protocol):
    """Says whether the model can answer."""

    def require_model(self) -> Model:
        """The served model. Raises ApiError 503."""
        ...


def json_response(
    payload: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(payload), status, headers, mimetype=JSON)


def error_response(error: Exception, record: Record) -> Response:
    """The answer to a request that failed before its first byte."""
    told = errors.as_api_error(error, record.request_id)
    record.error = told.message
    return json_response(errors.body(told, record.api), told.status, errors.headers(told))


class Answerer:
    """Answers requests for text, within the limits of the settings."""

    def __init__(
        self, settings: Settings, client: RunnerClient, readiness: Readiness, guard: Guard
    ) -> None:
        self._settings = settings
        self._client = client
        self._readiness = readiness
        self._guard = guard

    def generate(self, request: Request, record: Record, choose: Callable[[Any], Kind]) -> Response:
        """Answer a request for text. `choose` picks the kind once the body is known.

        Raises ApiError, RunnerUnavailableError; a handler's own surprises pass through.
        """
        self._guard.check_key(request.headers.get("Authorization"))
        _refuse_other_models(request)
        model = self._readiness.require_model()
        self._take_permits(record, 1)
        raw, value = self._body(request)
        kind = choose(value)
        record.api = kind.api
        call = body.in_thread_if_big(len(raw), kind.parse, value, model)
        del raw, value
        record.usage, record.stream = call.usage, call.stream
        record.validation_s = record.age_s()
        self._take_permits(record, len(call.sequences) - 1)
        generation = self._client.submit(call.sequences)
        connection = request.environ.get("gunicorn.socket")
        if call.stream:
            response = EventStream(call, generation, record).open(connection)
        else:
            response = _collect(call, generation, record, connection)
        self._describe(response, call.usage, record)
        return response

    def compute(
        self, request: Request, record: Record, choose: Callable[[Any], Computation]
    ) -> Response:
        """Answer a request that needs no runner. `choose` says how once the body is known."""
        self._guard.check_key(request.headers.get("Authorization"))
        model = self._readiness.require_model()
        raw, value = self._body(request)
        computation = choose(value)
        record.api = computation.api
        return json_response(body.in_thread_if_big(len(raw), computation.work, value, model))

    def _body(self, request: Request) -> tuple[bytes, Any]:
        raw = body.read(request.environ, self._settings.payload_limit)
        return raw, body.decode(raw, request.environ.get("CONTENT_TYPE"))

    def _take_permits(self, record: Record, num: int) -> None:
        """One for the request before any work, one for each further sequence once it is known."""
        if num > 0:
            self._guard.permits.take(num)
            record.at_end.append(lambda: self._guard.permits.give_back(num))

    def _describe(self, response: Response, usage: Usage, record: Record) -> None:
        """TGI's response headers; times are whole milliseconds."""
        headers = response.headers
        headers["x-compute-type"] = self._settings.compute_type or self._device()
        headers["x-compute-characters"] = str(usage.prompt_characters)
        if record.stream or response.status_code != 200:
            return
        total_s = record.age_s()
        per_token_s = usage.inference_s / max(1, usage.completion_tokens)
        headers["x-compute-time"] = f"{total_s:.6f}"
        headers["x-total-time"] = _milliseconds(total_s)
        headers["x-validation-time"] = _milliseconds(record.validation_s)
        headers["x-queue-time"] = _milliseconds(usage.queue_s)
        headers["x-inference-time"] = _milliseconds(usage.inference_s)
        headers["x-time-per-token"] = _milliseconds(per_token_s)
        headers["x-prompt-tokens"] = str(usage.prompt_tokens)
        headers["x-generated-tokens"] = str(usage.completion_tokens)

    def _device(self) -> str:
        card = self._client.card
        if card is None:
            return "unknown"
        return "1-" + _NOT_IN_A_NAME.sub("-", card.device_name.lower()).strip("-")


def _refuse_other_models(request: Request) -> None:
    """SageMaker names an adapter or a model of several in a header; this server has neither."""
    for header in _NAMES_A_MODEL:
        name = request.headers.get(header)
        if name:
            raise ApiError(
                404, f"{header} asks for {name[:100]!r}, but this server has one model only."
            )


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))


def _collect(call: Call, generation: Generation, record: Record, connection: object) -> Response:
    watch = HangUpWatch(connection, generation.close)
    try:
        return json_response(call.collect(generation))
    except GenerationClosedError:
        record.client_left = True
        return Response(status=400)  # to nobody
    finally:
        watch.stop()
        generation.close()
