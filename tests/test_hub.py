"""The hub: what is brought, from where, and the sentence when it cannot be.

Speaks to a small hub of its own over real HTTP. Must not know: the real hub.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from container import hub
from container.model_folder import ModelFilesError
from small_hub import COMMIT, Hub, running


@pytest.fixture
def a_hub() -> Iterator[Hub]:
    with running() as server:
        yield server


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
