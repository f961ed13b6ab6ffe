"""The whole server, judged by answers that are known beforehand: each script over each route.

Must not know: the inside of the product.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

import scripted_model as scripted
from server_process import Server, Servers


@pytest.fixture(scope="module")
def byte_level(shared_server: Servers, scripted_model: Path) -> Server:
    return shared_server(scripted_model, "--dtype", "float32")


@pytest.fixture(scope="module")
def metaspace(shared_server: Servers, metaspace_model: Path) -> Server:
    return shared_server(metaspace_model, "--dtype", "float32")


@pytest.fixture(scope="module")
def with_bos(shared_server: Servers, scripted_bos_model: Path) -> Server:
    return shared_server(scripted_bos_model, "--dtype", "float32")


def chat_body(name: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": scripted.trigger(name)}]
    return {"messages": messages, "temperature": 0, "max_tokens": 64} | fields


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Server, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """The JSON of each server-sent event; the end mark, if any, is left out."""
    with requests.post(f"{server.url}{path}", json=body, stream=True, timeout=60) as answer:
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith(b"data:") and line.removeprefix(b"data:").strip() != b"[DONE]":
                yield json.loads(line.removeprefix(b"data:"))


def streamed_chat(server: Server, path: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """All text, and the finish reasons."""
    text, reasons = "", []
    for event in events(server, path, body | {"stream": True}):
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, reasons


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize("name", scripted.TEXTS)
def test_chat_plays_each_script(byte_level: Server, name: str, path: str) -> None:
    choice = post(byte_level, path, chat_body(name))["choices"][0]
    assert choice["message"]["content"] == scripted.TEXTS[name]
    assert choice["finish_reason"] == "stop"
    assert streamed_chat(byte_level, path, chat_body(name)) == (scripted.TEXTS[name], ["stop"])


@pytest.mark.parametrize("name", scripted.TEXTS)
def test_generate_plays_each_script(byte_level: Server, name: str) -> None:
    body = {"inputs": scripted.trigger(name), "parameters": {"max_new_tokens": 64}}
    plain = post(byte_level, "/generate", body)
    assert plain["generated_text"] == scripted.TEXTS[name]
    last = list(events(byte_level, "/generate_stream", body))[-1]
    assert last["generated_text"] == scripted.TEXTS[name]


@pytest.mark.parametrize("name", [n for n in scripted.METASPACE_SCRIPTS if n in scripted.TEXTS])
def test_a_sentencepiece_tokenizer_says_the_same_streamed_and_whole(
    metaspace: Server, name: str
) -> None:
    path, body = "/v1/chat/completions", chat_body(name)
    whole = post(metaspace, path, body)["choices"][0]["message"]["content"]
    assert whole.lstrip(" ") == scripted.TEXTS[name].lstrip(" ")
    assert streamed_chat(metaspace, path, body)[0] == whole


def test_the_endless_script_ends_with_the_budget(byte_level: Server) -> None:
    body = chat_body(scripted.ENDLESS, max_tokens=50)
    expected = " la" * 50
    choice = post(byte_level, "/v1/chat/completions", body)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "length")
    assert streamed_chat(byte_level, "/v1/chat/completions", body) == (expected, ["length"])


@pytest.mark.parametrize(
    ("name", "stop", "expected"),
    [
        ("stop_split", "green", " red "),
        ("stop_split", "een bl", " red gr"),
        ("stop_almost", "five", scripted.TEXTS["stop_almost"]),
        ("stop_joined", "QXQY", " k1"),
        ("emoji", "😁", " grin "),
        ("newlines", "\n\nrow", "\n"),
    ],
)
def test_a_stop_string_over_several_tokens_is_never_seen(
    byte_level: Server, name: str, stop: str, expected: str
) -> None:
    path, body = "/v1/chat/completions", chat_body(name, stop=[stop])
    assert post(byte_level, path, body)["choices"][0]["message"]["content"] == expected
    assert streamed_chat(byte_level, path, body) == (expected, ["stop"])


def test_no_second_bos_over_chat(byte_level: Server, with_bos: Server) -> None:
    path, body = "/v1/chat/completions", chat_body("spaces")
    plain, adding = (post(server, path, body) for server in (byte_level, with_bos))
    assert adding["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert adding["choices"][0]["message"] == plain["choices"][0]["message"]


def test_scripts_do_not_mix_in_one_batch(byte_level: Server) -> None:
    def play(name: str) -> tuple[str, str]:
        return name, streamed_chat(byte_level, "/invocations", chat_body(name))[0]

    names = list(scripted.TEXTS) * 4
    with ThreadPoolExecutor(len(names)) as pool:
        for name, text in pool.map(play, names):
            assert text == scripted.TEXTS[name], name
