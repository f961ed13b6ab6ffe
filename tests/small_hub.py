"""A hub with a few models over real HTTP, and its refusals. Must not know: the product."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same again",
    "onnx/model.safetensors": b"the same for others",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "additional_chat_templates/tool_use.jinja": b"y",
    "modeling.py": b"code",
    "README.md": b"read me",
}
PICKLED = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "tokenizer.json": b"{}"}


class Hub(ThreadingHTTPServer):
    """Serves `org/model`, `org/pickled`, and refuses others as the hub does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.tokens: set[str | None] = set()
        self.downloads: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.api("/".join(parts[2:4]), parts[4:])
        else:
            self.file("/".join(parts[:2]), "/".join(parts[4:]))

    def api(self, model: str, rest: list[str]) -> None:
        if model == "org/gated":
            self.refuse(403, "GatedRepo")
        elif model == "org/private":
            self.refuse(401, "RepoNotFound")
        elif model == "org/broken":
            self.refuse(500, "")
        elif not rest:
            self.give(json.dumps({"id": model, "sha": COMMIT}).encode())
        elif rest[1] not in ("main", "v1", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif rest[0] == "revision":
            self.give(json.dumps({"id": model, "sha": COMMIT, "siblings": []}).encode())
        else:
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": etag(content)}
                for path, content in files_of(model).items()
            ]
            self.give(json.dumps(entries).encode())

    def file(self, model: str, path: str) -> None:
        self.server.downloads.append(path)
        self.give(files_of(model)[path])

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def give(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def files_of(model: str) -> dict[str, bytes]:
    return PICKLED if model == "org/pickled" else FILES


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
