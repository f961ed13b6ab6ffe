"""What each route answers: shapes, statuses, headers, choice of handler, keys, origins, limits."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.fake_runner import Failure, FakeRunner, Script, make_card
from tests.web_server import Web, serving

OPENAI_PATHS = ["/v1/chat/completions", "/v1/completions"]
TGI_PATHS = ["/generate", "/generate_stream", "/", "/invocations"]
GUARDED = [*OPENAI_PATHS, *TGI_PATHS, "/tokenize", "/chat_tokenize", "/detokenize"]
FAILURES = [
    Failure(91, "too_long", "far too long"),
    Failure(92, "overloaded", "no room"),
    Failure(93, "internal", "kernel fault"),
    Failure(94, "unavailable", "gone"),
]


def start(stack: ExitStack, folder: Path, **settings: Any) -> Web:
    web = stack.enter_context(serving(folder, **settings))
    script = Script(web.endpoint, make_card(), failures=FAILURES)
    stack.enter_context(FakeRunner(script))
    web.wait_for_ping(200)
    return web


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with ExitStack() as stack:
        yield start(stack, tmp_path_factory.mktemp("web"), max_concurrent_requests=8)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """A server with a key, an origin, and chat at a path of its own."""
    with ExitStack() as stack:
        yield start(
            stack,
            tmp_path_factory.mktemp("locked"),
            api_key="Key-1",
            cors_allow_origin=["https://a.example", "https://b.example"],
            oai_chat_route="/talk/here",
            served_model_name="org/a-name",
        )


def test_health_routes_answer_200_without_a_body(web: Web) -> None:
    for method, path in [("GET", "/ping"), ("POST", "/ping"), ("GET", "/health"), ("GET", "/")]:
        answer = requests.request(method, web.url + path, timeout=5)
        assert (answer.status_code, answer.content) == (200, b"")


def test_every_generation_route_answers_in_its_api(web: Web) -> None:
    body = {"ids": [[1, 2], [3]], "inputs": "x"}
    for path in [*OPENAI_PATHS, "/generate", "/", "/invocations"]:
        answer = web.post(path, body)
        assert answer.status_code == 200, path
        assert answer.headers["Content-Type"] == "application/json"
        api = "openai" if path in OPENAI_PATHS else "tgi"
        assert answer.json() == {"api": api, "tokens": [[1, 2, 1], [3, 3, 3]]}


def test_generate_stream_streams_without_being_asked(web: Web) -> None:
    answer = web.post("/generate_stream", {"ids": [[5]]})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"inputs": "x"}, "tgi"),
        ({"messages": []}, "openai"),
        ({"prompt": ""}, "openai"),
        ({"inputs": "x", "messages": [], "prompt": ""}, "tgi"),
        ({"prompt": "", "messages": []}, "openai"),
    ],
)
def test_invocations_chooses_by_the_body(web: Web, body: Any, api: str) -> None:
    assert web.post("/invocations", body).json()["api"] == api


@pytest.mark.parametrize("body", [{}, {"text": "x", "n": 1}, [], "inputs", 5, None, True])
def test_invocations_says_what_it_needs(web: Web, body: Any) -> None:
    answer = requests.post(f"{web.url}/invocations", data=json.dumps(body), timeout=5)
    assert answer.status_code == 422
    for name in ("`inputs`", "`messages`", "`prompt`"):
        assert name in answer.json()["error"]


def test_errors_of_invocations_have_the_shape_of_the_request(web: Web) -> None:
    chat = web.post("/invocations", {"messages": [], "boom": "api"})
    assert chat.status_code == 404
    assert chat.json() == {
        "error": {
            "message": "no such thing",
            "type": "invalid_request_error",
            "param": "ids",
            "code": "odd",
        }
    }
    native = web.post("/invocations", {"inputs": "", "boom": "api"})
    assert native.json() == {"error": "no such thing", "error_type": "odd_kind"}


@pytest.mark.parametrize("boom", ["parse", "generate"])
@pytest.mark.parametrize("path", [*OPENAI_PATHS, "/generate", "/", "/generate_stream"])
def test_a_fault_of_ours_shows_an_id_and_no_details(web: Web, path: str, boom: str) -> None:
    answer = web.post(path, {"ids": [[1]], "boom": boom}, headers={"X-Request-Id": "find-me"})
    assert answer.status_code == 500
    assert "find-me" in answer.text
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert "secret detail" in web.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("first_id", "openai", "tgi"), [(91, 400, 422), (92, 429, 429), (93, 500, 424), (94, 503, 503)]
)
def test_failures_before_the_first_byte_have_their_status(
    web: Web, first_id: int, openai: int, tgi: int, stream: bool
) -> None:
    body = {"ids": [[first_id]], "stream": stream}
    chat = web.post("/v1/chat/completions", body)
    assert chat.status_code == openai
    assert set(chat.json()["error"]) == {"message", "type", "param", "code"}
    native = web.post("/", body)
    assert native.status_code == tgi
    assert set(native.json()) == {"error", "error_type"}
    assert ("Retry-After" in chat.headers) == (openai in (429, 503))


def test_unknown_routes_and_methods_are_json(web: Web) -> None:
    for path in ("/v1/nothing", "/nothing"):
        answer = requests.get(web.url + path, timeout=5)
        assert answer.status_code == 404
        assert answer.headers["Content-Type"] == "application/json"
        assert isinstance(answer.json()["error"], dict) == path.startswith("/v1/")
    answer = requests.get(f"{web.url}/v1/chat/completions", timeout=5)
    assert answer.status_code == 405
    assert "POST" in answer.headers["Allow"]
    assert "POST" in answer.json()["error"]["message"]
    assert requests.delete(f"{web.url}/invocations", timeout=5).json()["error"]


@pytest.mark.parametrize("path", ["//v1/completions", "/v1/completions/", "/v1//completions//"])
def test_careless_slashes_are_forgiven(web: Web, path: str) -> None:
    assert web.post(path, {"ids": [[1]]}).json()["api"] == "openai"


def test_head_of_a_health_route(web: Web) -> None:
    assert requests.head(f"{web.url}/ping", timeout=5).status_code == 200


@pytest.mark.parametrize("name", ["Adapter-Identifier", "Target-Model"])
def test_a_header_that_names_another_model_is_refused(web: Web, name: str) -> None:
    headers = {f"X-Amzn-SageMaker-{name}": "other"}
    answer = web.post("/invocations", {"inputs": "x"}, headers=headers)
    assert answer.status_code == 404
    assert "'other'" in answer.json()["error"]


def test_inference_headers(web: Web) -> None:
    plain = web.post("/generate", {"ids": [[1, 2]]}).headers
    assert plain["x-prompt-tokens"] == "2"
    assert plain["x-generated-tokens"] == "3"
    assert plain["x-compute-characters"] == "7"
    assert plain["x-compute-type"] == "1-cpu"
    assert float(plain["x-compute-time"]) > 0
    for name in ("total", "validation", "queue", "inference"):
        assert plain[f"x-{name}-time"].isdigit()
    assert plain["x-time-per-token"].isdigit()
    streamed = web.post("/generate_stream", {"ids": [[1, 2]]}).headers
    assert streamed["x-compute-type"] == "1-cpu"
    assert "x-total-time" not in streamed


def test_request_ids(web: Web) -> None:
    given = requests.get(f"{web.url}/ping", headers={"X-Request-Id": "abc-1"}, timeout=5)
    assert given.headers["X-Request-Id"] == "abc-1"
    for bad in ("x" * 200, "a b", "é".encode("latin-1")):
        made = requests.get(f"{web.url}/ping", headers={"X-Request-Id": bad}, timeout=5)
        assert len(made.headers["X-Request-Id"]) == 32


def test_one_log_line_per_request(web: Web) -> None:
    headers = {
        "X-Request-Id": "log-line-1",
        "X-Amzn-SageMaker-Inference-Id": "inf-77",
        "X-Amzn-SageMaker-Custom-Attributes": "whatever=1",
    }
    web.post("/invocations", {"inputs": "x", "ids": [[1, 2]]}, headers=headers)
    [line] = [line for line in web.log.read_text().splitlines() if "log-line-1" in line]
    for part in (
        "POST /invocations 200",
        "prompt_tokens=2",
        "generated_tokens=3",
        "finish_reason=length",
        "inference_id=inf-77",
    ):
        assert part in line


def test_models(web: Web, locked: Web) -> None:
    listed = requests.get(f"{web.url}/v1/models", timeout=5).json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "fake/model"
    for name in ("fake/model", "fake%2Fmodel", "/fake/model", "%2Ffake%2Fmodel"):
        one = requests.get(f"{web.url}/v1/models/{name}", timeout=5)
        assert (one.status_code, one.json()["id"]) == (200, "fake/model")
    other = requests.get(f"{web.url}/v1/models/other", timeout=5)
    assert other.status_code == 404
    assert other.json()["error"]["code"] == "model_not_found"
    renamed = requests.get(f"{locked.url}/v1/models", timeout=5).json()
    assert renamed["data"][0]["id"] == "org/a-name"


def test_info(web: Web) -> None:
    info = requests.get(f"{web.url}/info", timeout=5).json()
    expected = {"model_id": "fake/model", "max_total_tokens": 1024, "status": "ready"}
    assert {key: info[key] for key in expected} == expected
    for key in ("chat_template", "chat_template_source", "attention", "kv_capacity_tokens"):
        assert key in info


def test_tokenizing(web: Web) -> None:
    assert web.post("/tokenize", {"inputs": "four"}).json() == [4]
    assert web.post("/chat_tokenize", {"messages": []}).json() == {"tokenize_response": []}


@pytest.mark.parametrize("path", GUARDED)
def test_a_key_guards_every_route_that_works(locked: Web, path: str) -> None:
    body = {"inputs": "x", "messages": []}
    for given in (None, "Bearer wrong", "Bearer", "Key-1", "Basic Key-1", "Bearer key-1"):
        headers = {} if given is None else {"Authorization": given}
        answer = locked.post(path, body, headers=headers)
        assert answer.status_code == 401, given
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]
    for given in ("Bearer Key-1", "bearer Key-1", "BEARER  Key-1"):
        assert locked.post(path, body, headers={"Authorization": given}).status_code == 200


def test_a_key_does_not_guard_health_and_information(locked: Web) -> None:
    for path in ("/ping", "/health", "/", "/info", "/v1/models"):
        assert requests.get(locked.url + path, timeout=5).status_code == 200


def test_browsers_may_ask_first(web: Web, locked: Web) -> None:
    asked = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for server in (web, locked):
        for path in ("/v1/chat/completions", "/invocations", "/anything"):
            answer = requests.options(server.url + path, headers=asked, timeout=5)
            assert answer.status_code == 200
            assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
            assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"


def test_origins(web: Web, locked: Web) -> None:
    def allowed(server: Web, origin: str) -> str | None:
        answer = requests.get(f"{server.url}/info", headers={"Origin": origin}, timeout=5)
        assert "Origin" in answer.headers["Vary"]
        return answer.headers.get("Access-Control-Allow-Origin")

    assert allowed(web, "https://x.example") == "*"
    assert allowed(locked, "https://b.example") == "https://b.example"
    assert allowed(locked, "https://x.example") is None


def test_chat_answers_at_a_path_of_ones_own(locked: Web) -> None:
    answer = locked.post("/talk/here", {"ids": [[1]]}, headers={"Authorization": "Bearer Key-1"})
    assert answer.json()["api"] == "openai"


@pytest.mark.parametrize(
    ("settings", "api"),
    [
        ({"invocations_mode": "chat"}, "openai"),
        ({"messages_api_enabled": True}, "openai"),
        ({"oai_chat_route": "/invocations"}, "openai"),
        ({"invocations_mode": "generate"}, "tgi"),
    ],
)
def test_invocations_can_be_one_api_only(
    tmp_path: Path, settings: dict[str, Any], api: str
) -> None:
    with ExitStack() as stack:
        web = start(stack, tmp_path, **settings)
        for body in ({"inputs": "x"}, {"messages": []}, {"prompt": ""}, {"ids": [[1]]}):
            assert web.post("/invocations", body).json()["api"] == api
        broken = requests.post(f"{web.url}/invocations", data="{", timeout=5).json()
        assert isinstance(broken["error"], dict) == (api == "openai")


def test_not_ready_is_said_with_the_reason(tmp_path: Path) -> None:
    with serving(tmp_path) as web:
        (tmp_path / "phase").write_text("downloading org/model")
        web.wait_for_ping(503)
        for path in ("/ping", "/health", "/"):
            answer = requests.get(web.url + path, timeout=5)
            assert answer.status_code == 503
            assert "downloading org/model" in answer.json()["error"]
        for path in ("/v1/completions", "/invocations", "/tokenize"):
            answer = web.post(path, {"inputs": "x"})
            assert answer.status_code == 503
            assert "downloading org/model" in answer.text
            assert answer.headers["Retry-After"]
        assert requests.get(f"{web.url}/info", timeout=5).json()["status"]
        script = Script(web.endpoint, make_card(), loading="loading weights 42 %")
        with FakeRunner(script) as runner:
            while "42 %" not in (text := requests.get(f"{web.url}/ping", timeout=5).text):
                assert "downloading" in text
            runner.become_ready()
            assert web.wait_for_ping(200) < 0.9


def test_too_many_at_once_are_told_so_at_once(tmp_path: Path) -> None:
    with (
        serving(tmp_path, max_concurrent_requests=4) as web,
        FakeRunner(Script(web.endpoint, make_card(), 0.005)) as runner,
    ):
        web.wait_for_ping(200)
        body = {"ids": [[1]], "max_tokens": 100_000, "stream": True}
        open_streams = [web.post("/v1/completions", body, stream=True) for _ in range(4)]
        assert [answer.status_code for answer in open_streams] == [200] * 4
        for path in ("/v1/chat/completions", "/generate"):
            answer = web.post(path, {"ids": [[2]]})
            assert answer.status_code == 429
            assert answer.headers["Retry-After"]
            assert "Model is overloaded" in answer.text
        assert web.ping() == 200
        open_streams[0].close()
        runner.wait_until(lambda: len(runner.aborts) == 1)
        assert web.post("/generate", {"ids": [[2]]}).status_code == 200
        assert web.post("/generate", {"ids": [[2], [3]]}).status_code == 429
        assert web.post("/generate", {"ids": [[2]]}).status_code == 200
        for answer in open_streams[1:]:
            answer.close()
