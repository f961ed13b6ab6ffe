"""The one place that turns an exception into a status and a body, in the shape of each API.

OpenAI: `{"error": {"message", "type", "param", "code"}}`. TGI: `{"error": text, "error_type"}`,
the text a string because its clients search in it. Bodies are short JSON: SageMaker passes them
on inside its own error. Must not know: routes, the socket's protocol.
"""

import logging
from typing import Any

from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from handler.contract import Api, ApiError
from handler.runner.client import RunnerUnavailableError

log = logging.getLogger(__name__)

RETRY_AFTER_S = {429: 1, 503: 5}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "model_overloaded", 503: "model_not_ready"}


def not_ready(reason: str) -> ApiError:
    """503: the model cannot answer now."""
    return ApiError(503, f"The model is not ready: {reason}.", code=_CODES[503], kind="unavailable")


def overloaded() -> ApiError:
    """429 with TGI's own words."""
    return ApiError(429, "Model is overloaded", code=_CODES[429], kind="overloaded")


def unauthorized(message: str) -> ApiError:
    """401: the API key is missing or wrong."""
    return ApiError(401, message, code=_CODES[401], kind="unauthorized")


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """What the client is told of any exception. The traceback of a surprise is logged, not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RunnerUnavailableError):
        return not_ready(str(error))
    if isinstance(error, RecursionError):
        return ApiError(400, "The request body is nested too deeply.")
    if isinstance(error, HTTPException):
        return _from_http(error)
    log.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
    return ApiError(
        500, f"Internal error; the server's log has it under request {request_id}.", kind="internal"
    )


def _from_http(error: HTTPException) -> ApiError:
    status = error.code or 500
    if isinstance(error, NotFound):
        return ApiError(404, "There is no such route.", kind="not_found")
    if isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(set(error.valid_methods or ()) - {"OPTIONS", "HEAD"}))
        return ApiError(405, f"This route answers {allowed} only.", kind="method_not_allowed")
    return ApiError(status, error.description or error.name)


def body(error: ApiError, api: Api) -> dict[str, Any]:
    """The JSON body of an error answer, and of an error event in a stream."""
    if api == "tgi":
        return {"error": error.message, "error_type": error.kind}
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI_TYPES.get(error.status, default),
            "param": error.param,
            "code": error.code,
        }
    }


def headers(error: ApiError) -> dict[str, str]:
    """Headers that belong to the status."""
    found: dict[str, str] = {}
    if error.status in RETRY_AFTER_S:
        found["Retry-After"] = str(RETRY_AFTER_S[error.status])
    if error.status == 401:
        found["WWW-Authenticate"] = "Bearer"
    return found
