"""Streams over real sockets: order, many at once, failures, clients that leave, silence."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gevent
import pytest
import requests

from container.settings import Settings
from container.web import stream
from container.web.app import create_app
from handler.runner.client import RunnerClient
from tests import web_stand_in
from tests.fake_runner import Failure, FakeRunner, Script, make_card
from tests.web_server import Web, serving

STEP_S = 0.01
LONG = {"max_tokens": 100_000}
FAILURES = [
    Failure(91, "internal", "kernel fault", num_tokens=2),
    Failure(92, "unavailable", "gone", num_tokens=1),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Web, FakeRunner]]:
    with ExitStack() as stack:
        web = stack.enter_context(serving(tmp_path_factory.mktemp("web")))
        script = Script(web.endpoint, make_card(), STEP_S, failures=FAILURES)
        runner = stack.enter_context(FakeRunner(script))
        web.wait_for_ping(200)
        yield web, runner


@pytest.fixture
def web(served: tuple[Web, FakeRunner]) -> Web:
    return served[0]


@pytest.fixture
def runner(served: tuple[Web, FakeRunner]) -> Iterator[FakeRunner]:
    runner = served[1]
    runner.wait_until(lambda: runner.num_running == 0)
    runner.aborts.clear()
    yield runner
    runner.release()


def events(answer: requests.Response) -> list[Any]:
    """The payloads of a stream that ended; its framing is checked on the way."""
    text = answer.content.decode()
    found = re.findall(r"data: ([^\n]+)\n\n", text)
    assert "".join(f"data: {payload}\n\n" for payload in found) == text
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in found]


def tokens(payloads: list[Any], index: int = 0) -> list[int]:
    return [
        token
        for payload in payloads
        if isinstance(payload, dict) and payload.get("i") == index
        for token in payload.get("t", [])
    ]


def test_framing_and_headers(web: Web, runner: FakeRunner) -> None:
    answer = web.post("/v1/chat/completions", {"ids": [[1, 2]], "stream": True})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert "Content-Encoding" not in answer.headers
    found = events(answer)
    assert found[0] == {"role": "assistant"}
    assert tokens(found) == [1, 2, 1]
    assert found[-2:] == [{"i": 0, "finish": "length"}, "[DONE]"]


@pytest.mark.parametrize("path", ["/", "/generate_stream", "/invocations"])
def test_native_streams_have_no_end_mark(web: Web, runner: FakeRunner, path: str) -> None:
    found = events(web.post(path, {"inputs": "x", "ids": [[1]], "stream": True}))
    assert found[-1] == {"i": 0, "finish": "length"}


def test_64_streams_at_once_are_whole_and_uncrossed(web: Web, runner: FakeRunner) -> None:
    def ask(number: int) -> list[Any]:
        body = {"ids": [[number, number + 1]], "max_tokens": 30, "stream": True}
        return events(web.post("/v1/chat/completions", body))

    with ThreadPoolExecutor(64) as pool:
        for number, found in enumerate(pool.map(ask, range(100, 164)), start=100):
            assert tokens(found) == [number, number + 1] * 15
            assert found[-1] == "[DONE]"


def test_what_comes_in_one_step_leaves_in_one_write(web: Web, runner: FakeRunner) -> None:
    body = {"ids": [[n] for n in range(1, 33)], "max_tokens": 3, "stream": True}
    answer = web.post("/v1/completions", body, stream=True)
    parts = list(answer.raw.read_chunked())
    assert sum(part.count(b"data: ") for part in parts) == 1 + 32 * 4 + 1
    assert len(parts) <= 6


def test_a_failure_in_the_middle_is_the_last_event(web: Web, runner: FakeRunner) -> None:
    chat = events(web.post("/v1/chat/completions", {"ids": [[91]], "stream": True}))
    assert tokens(chat) == [91, 91]
    assert chat[-1] == "[DONE]"
    assert chat[-2]["error"]["type"] == "server_error"
    assert chat[-2]["error"]["message"] == "kernel fault"
    native = events(web.post("/generate_stream", {"ids": [[91]]}))
    assert native[-1] == {
        "error": "Request failed during generation: kernel fault",
        "error_type": "generation",
    }


def test_one_failing_sequence_ends_its_call_and_frees_the_others(
    web: Web, runner: FakeRunner
) -> None:
    body = {"ids": [[1], [92]], **LONG}
    for ask in (body, body | {"stream": True}):
        answer = web.post("/v1/completions", ask)
        assert answer.status_code == (200 if "stream" in ask else 503)
        assert "gone" in answer.text
        runner.wait_until(lambda: runner.num_running == 0)
    assert len(runner.aborts) == 2


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_slots_within_two_steps(
    web: Web, runner: FakeRunner, streaming: bool
) -> None:
    body = json.dumps({"ids": [[1], [2]], "stream": streaming, **LONG}).encode()
    steps = runner.num_steps
    with socket.create_connection(("127.0.0.1", web.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        runner.wait_until(lambda: runner.num_steps >= steps + 3)
        before = runner.num_steps
    runner.wait_until(lambda: len(runner.aborts) == 2)
    # One step may have been running when the connection closed.
    assert runner.num_steps <= before + 3
    assert "POST /v1/completions 499" in wait_for_log(web, " 499 ")


def test_a_client_that_resets_is_noticed_too(web: Web, runner: FakeRunner) -> None:
    body = json.dumps({"ids": [[1]], **LONG}).encode()
    connection = socket.create_connection(("127.0.0.1", web.port))
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    runner.wait_until(lambda: runner.num_running == 1)
    linger_none = b"\1\0\0\0\0\0\0\0"
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_none)
    connection.close()
    runner.wait_until(lambda: len(runner.aborts) == 1, 2.0)


def test_a_client_that_leaves_while_it_waits_for_its_turn(web: Web, runner: FakeRunner) -> None:
    runner.hold()
    with pytest.raises(requests.Timeout):
        requests.post(
            f"{web.url}/v1/completions", json={"ids": [[1]], "stream": True, **LONG}, timeout=0.3
        )
    runner.wait_until(lambda: len(runner.aborts) == 1, 2.0)
    assert runner.aborts[0][1] == 0


def test_a_pipelined_request_is_neither_lost_nor_taken_for_a_hang_up(
    web: Web, runner: FakeRunner
) -> None:
    body = json.dumps({"ids": [[5]], "max_tokens": 40}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", web.port), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        runner.wait_until(lambda: runner.num_running == 1)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with connection.makefile("rb") as answer:
            both = answer.read()
    assert both.count(b"HTTP/1.1 200") == 2
    assert b'"object":"list"' in both
    assert runner.aborts == []


def test_a_client_that_leaves_behind_a_pipelined_request_is_noticed(
    web: Web, runner: FakeRunner
) -> None:
    body = json.dumps({"ids": [[5]], **LONG}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", web.port)) as connection:
        connection.sendall(head.encode() + body)
        runner.wait_until(lambda: runner.num_running == 1)
        connection.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    runner.wait_until(lambda: len(runner.aborts) == 1, 2.0)


def test_200_clients_that_leave_cost_nothing_in_the_end(web: Web, runner: FakeRunner) -> None:
    def leave() -> None:
        body = {"ids": [[1]], "stream": True, **LONG}
        with web.post("/v1/completions", body, stream=True) as answer:
            next(answer.iter_content(10))

    worker = worker_pid(web)
    leave()
    before = len(list(Path(f"/proc/{worker}/fd").iterdir()))
    with ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(leave) for _ in range(200)]:
            result.result()
    runner.wait_until(lambda: len(runner.aborts) == 201)
    assert runner.num_running == 0
    assert web.ping() == 200
    assert len(list(Path(f"/proc/{worker}/fd").iterdir())) <= before + 10


def test_ping_is_quick_while_32_streams_run_and_20_mb_arrive(web: Web, runner: FakeRunner) -> None:
    big = json.dumps({"inputs": "lorem ipsum " * 1_700_000}).encode()
    body = {"ids": [[1]], "stream": True, **LONG}
    with ExitStack() as stack:
        for _ in range(32):
            answer = stack.enter_context(web.post("/v1/completions", body, stream=True))
            threading.Thread(target=drain, args=(answer,), daemon=True).start()
        sender = threading.Thread(
            target=lambda: requests.post(f"{web.url}/invocations", data=big, timeout=30)
        )
        times = []
        with requests.Session() as session:
            sender.start()
            while sender.is_alive() or len(times) < 50:
                start = time.monotonic()
                assert session.get(f"{web.url}/ping", timeout=5).status_code == 200
                times.append(time.monotonic() - start)
    print(f"slowest of {len(times)} pings: {max(times) * 1000:.1f} ms")
    assert max(times) < 1.0  # the goal is 0.1 s; a test machine that is busy must not fail it


def drain(answer: requests.Response) -> None:
    try:
        for _ in answer.iter_content(None):
            pass
    except Exception:  # noqa: BLE001 - the test closes it under our hands
        return


def worker_pid(web: Web) -> int:
    children = Path(f"/proc/{web.process.pid}/task/{web.process.pid}/children").read_text()
    return int(children.split()[0])


def wait_for_log(web: Web, text: str) -> str:
    deadline = time.monotonic() + 5
    while text not in (log := web.log.read_text()):
        assert time.monotonic() < deadline, log
        time.sleep(0.01)
    return log


def test_silence_is_filled_with_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 0.05)
    client = RunnerClient(f"ipc://{tmp_path}/r")
    app = create_app(Settings(), client, tmp_path, web_stand_in.handlers())
    with FakeRunner(Script(f"ipc://{tmp_path}/r", make_card())) as runner:
        client.start()
        web = app.test_client()
        while web.get("/ping").status_code != 200:
            gevent.sleep(0.005)
        runner.hold()
        threading.Timer(0.3, runner.release).start()
        body = {"ids": [[4]], "stream": True}
        answer = web.post("/v1/completions", json=body)
        assert answer.status_code == 200
        text = answer.get_data(as_text=True)
        client.stop()
    role = 'data: {"role":"assistant"}\n\n'
    assert re.fullmatch(role + r"(:\n\n){2,}(data: [^\n]+\n\n)+", text)
    assert text.endswith("data: [DONE]\n\n")
