"""The hub: what is brought, from where, and the sentence when it cannot be.

Speaks to a small hub of its own over real HTTP. Must not know: the real hub.
"""

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from container import hub
from container.model_folder import ModelFilesError

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


@pytest.fixture
def a_hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def source(a_hub: Hub, cache: Path, model: str = "org/model", **changes: object) -> hub.Source:
    fields: dict[str, object] = {
        "revision": None,
        "token": None,
        "cache": cache,
        "offline": False,
        "with_code": False,
        "endpoint": a_hub.url,
        **changes,
    }
    return hub.Source(model, **fields)  # type: ignore[arg-type]


def refusal(wanted: hub.Source) -> str:
    with pytest.raises(ModelFilesError) as caught:
        hub.fetch(wanted)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_needed_is_brought_and_nothing_twice(a_hub: Hub, tmp_path: Path) -> None:
    folder = hub.fetch(source(a_hub, tmp_path, token="hf_t"))
    assert folder.name == COMMIT
    assert names(folder) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    }
    assert a_hub.tokens == {"Bearer hf_t"}


def test_code_is_brought_only_where_it_is_trusted(a_hub: Hub, tmp_path: Path) -> None:
    assert "modeling.py" in names(hub.fetch(source(a_hub, tmp_path, with_code=True)))


def test_pickled_weights_are_brought_only_where_they_are_trusted(
    a_hub: Hub, tmp_path: Path
) -> None:
    pickled = source(a_hub, tmp_path, "org/pickled")
    assert "pytorch_model.bin" not in names(hub.fetch(pickled))
    pickled = source(a_hub, tmp_path, "org/pickled", with_code=True)
    assert "pytorch_model.bin" in names(hub.fetch(pickled))


def test_what_was_brought_once_is_there_without_the_network(a_hub: Hub, tmp_path: Path) -> None:
    first = hub.fetch(source(a_hub, tmp_path, revision="v1"))
    a_hub.downloads.clear()
    assert hub.fetch(source(a_hub, tmp_path, revision="v1", offline=True)) == first
    assert hub.fetch(source(a_hub, tmp_path, revision=COMMIT)) == first
    assert a_hub.downloads == []


def test_offline_and_not_in_the_cache(a_hub: Hub, tmp_path: Path) -> None:
    message = refusal(source(a_hub, tmp_path, offline=True))
    assert "org/model is not in the hub cache" in message
    assert a_hub.tokens == set()


@pytest.mark.parametrize(
    ("model", "changes", "parts"),
    [
        ("org/gated", {}, ["org/gated is gated", "HF_TOKEN", "accept its terms"]),
        ("org/gated", {"token": "t"}, ["org/gated is gated", "account of the token"]),
        ("org/private", {}, ["no model org/private", "HF_TOKEN"]),
        ("org/private", {"token": "t"}, ["no model org/private", "may not see it"]),
        ("org/model", {"revision": "v9"}, ["no revision v9", "--revision"]),
        ("org/model", {"endpoint": "http://127.0.0.1:9"}, ["could not be reached", "--model-id"]),
        ("org/broken", {}, ["could not be reached", "500"]),
    ],
)
def test_refusals(
    a_hub: Hub, tmp_path: Path, model: str, changes: dict[str, object], parts: list[str]
) -> None:
    message = refusal(source(a_hub, tmp_path, model, **changes))
    for part in parts:
        assert part in message


def test_a_hub_that_never_answers(a_hub: Hub, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        message = refusal(source(a_hub, tmp_path, endpoint=url, patience_s=0.2))
        assert "could not be reached" in message
        brought = hub.fetch(source(a_hub, tmp_path))
        cached = source(a_hub, tmp_path, endpoint=url, patience_s=0.2)
        assert hub.fetch(cached) == brought


def test_hub_ids() -> None:
    for text in ("gpt2", "org/model", "Qwen/Qwen3-0.6B", "a_b/c.d"):
        assert hub.is_hub_id(text)
    for text in ("", "a/b/c", "/a", "a/", "../a", "a b", "s3://bucket/x", "http://x/y"):
        assert not hub.is_hub_id(text)
