"""The Flask application of one worker: put together, and what is done around every request.

Must not know: gunicorn, how requests are answered. Importing it loads neither torch nor
transformers.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from flask import Flask, Response, g, request
from werkzeug.exceptions import MethodNotAllowed

from container.settings import Settings
from container.web import access, routes
from container.web.answer import Answerer, error_response
from container.web.guard import Guard
from container.web.invocations import Handlers
from container.web.readiness import Readiness
from handler.runner.client import RunnerClient

_SLASHES = re.compile("/+")


def create_app(
    settings: Settings, client: RunnerClient, run_dir: Path | str, handlers: Handlers | None = None
) -> Flask:
    """The application for one worker; `client` is started by the caller. `handlers`: for tests."""
    if handlers is None:
        from container.web.handlers import real_handlers

        handlers = real_handlers()
    build_model = handlers.build_model
    guard = Guard(settings)
    readiness = Readiness(client, Path(run_dir), lambda card: build_model(card, settings))
    answerer = Answerer(settings, client, readiness, guard)
    app = Flask("invocant", static_folder=None)
    routes.register(app, settings, handlers, readiness, answerer)
    _surround(app, guard)
    app.wsgi_app = _tidy_paths(app.wsgi_app)  # type: ignore[method-assign, assignment]
    return app


def _tidy_paths(wsgi: WSGIApplication) -> WSGIApplication:
    """`//v1/models/` is `/v1/models`: clients join addresses carelessly, and few follow a redirect
    with a body."""

    def tidied(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ["PATH_INFO"] = "/" + _SLASHES.sub("/", environ["PATH_INFO"]).strip("/")
        return wsgi(environ, start_response)

    return tidied


def _surround(app: Flask, guard: Guard) -> None:
    """What happens before and after every request, whichever route answers it."""

    @app.before_request
    def begin() -> Response | None:
        g.record = access.begin(request)
        if request.path.startswith("/v1/"):
            g.record.api = "openai"
        if request.method == "OPTIONS":
            requested = request.headers.get("Access-Control-Request-Headers")
            return Response(status=200, headers=guard.preflight_headers(requested))
        return None

    @app.errorhandler(Exception)
    def failed(error: Exception) -> Response:
        response = error_response(error, g.record)
        if isinstance(error, MethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(error.valid_methods or ()))
        return response

    @app.after_request
    def end(response: Response) -> Response:
        record = g.record
        record.status = response.status_code
        response.headers["X-Request-Id"] = record.request_id
        response.headers.extend(guard.cors_headers(request.headers.get("Origin")))
        response.call_on_close(record.finish)
        return response
