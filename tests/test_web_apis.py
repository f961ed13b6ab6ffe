"""The real handlers behind the real server, as clients meet them; the runner repeats the prompt."""

import json
from collections.abc import Iterator
from contextlib import ExitStack

import openai
import pytest
import requests

from tests.fake_runner import FakeRunner, Script
from tests.handler_support import make_card
from tests.web_server import Web, serving

MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    folder = tmp_path_factory.mktemp("web")
    with ExitStack() as stack:
        web = stack.enter_context(serving(folder, "container.web.server"))
        stack.enter_context(FakeRunner(Script(web.endpoint, make_card(folder))))
        web.wait_for_ping(200)
        yield web


@pytest.fixture(scope="module")
def client(web: Web) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{web.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def payloads(answer: requests.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="x", prompt=["hello", "abc"], max_tokens=7)
    assert [choice.text for choice in answer.choices] == ["hellohe", "abcabca"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 14)
    chunks = list(client.completions.create(model="x", prompt="hello", max_tokens=6, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "helloh"


def test_tokenize_in_both_forms(web: Web) -> None:
    tokens = web.post("/tokenize", {"inputs": "hi"}).json()
    ids = [token["id"] for token in tokens]
    answer = web.post("/tokenize", {"model": "x", "prompt": "hi"}).json()
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert web.post("/detokenize", {"tokens": ids}).json() == {"prompt": "hi"}
    rendered = web.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert web.post("/detokenize", {"tokens": rendered}).json() == {"prompt": RENDERED}


def test_tokenize_errors_have_the_shape_of_the_form(web: Web) -> None:
    for path, body in [
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": 5}),
        ("/detokenize", {"tokens": 5}),
        ("/detokenize", []),
    ]:
        answer = web.post(path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for body in ({"inputs": 5}, {"inputs": 5, "prompt": "x"}, {}):
        answer = web.post("/tokenize", body)
        assert answer.status_code == 422
        assert answer.json()["error_type"] == "validation"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="x", messages=MESSAGES, max_tokens=8)  # type: ignore[arg-type]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    chunks = client.chat.completions.create(
        model="x",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=8,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == answer.choices[0].message.content


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_chat_streams_end_with_done(web: Web, path: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True}
    found = payloads(web.post(path, body))
    assert found[-1] == "[DONE]"
    assert json.loads(found[0])["choices"][0]["delta"]["role"] == "assistant"


def test_generate_in_its_three_dresses(web: Web) -> None:
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 5, "return_full_text": False}}
    assert web.post("/generate", body).json() == {"generated_text": "abcab"}
    for path in ("/", "/invocations"):
        assert web.post(path, body).json() == [{"generated_text": "abcab"}]
    for path in ("/generate_stream", "/", "/invocations"):
        found = payloads(web.post(path, body | {"stream": True}))
        assert "[DONE]" not in found
        assert "".join(json.loads(payload)["token"]["text"] for payload in found) == "abcab"
        assert json.loads(found[-1])["generated_text"] == "abcab"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_is_a_4xx_in_the_shape_of_the_api(web: Web, stream: bool) -> None:
    long = "x" * 300
    chat = web.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": long}], "stream": stream},
    )
    assert chat.status_code == 400
    assert chat.json()["error"]["code"] == "context_length_exceeded"
    native = web.post("/generate_stream" if stream else "/generate", {"inputs": long})
    assert native.status_code == 422
    assert native.json()["error_type"] == "validation"


def test_invalid_fields_are_named(web: Web) -> None:
    chat = web.post("/v1/chat/completions", {"messages": MESSAGES, "temperature": "hot"})
    assert chat.status_code == 400
    assert chat.json()["error"]["param"] == "temperature"
    native = web.post("/generate", {"inputs": "x", "parameters": {"top_k": 0}})
    assert native.status_code == 422
    assert "top_k" in native.json()["error"]


def test_tokenizing(web: Web) -> None:
    tokens = web.post("/tokenize", {"inputs": "ab"}).json()
    assert [token["text"] for token in tokens] == ["a", "b"]
    assert web.post("/chat_tokenize", {"messages": MESSAGES}).json()["templated_text"] == RENDERED


def test_headers_count_what_was_done(web: Web) -> None:
    headers = web.post("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 5}}).headers
    assert headers["x-prompt-tokens"] == "3"
    assert headers["x-generated-tokens"] == "5"
    assert headers["x-compute-characters"] == "3"


def test_info_shows_the_template(web: Web) -> None:
    info = requests.get(f"{web.url}/info", timeout=5).json()
    assert "im_start" in info["chat_template"]
    assert info["chat_template_source"] == "chat_template.jinja"
