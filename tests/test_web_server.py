"""The server as a process: start, SIGTERM, a port that is taken, a runner that is killed."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.fake_runner import FakeRunner, Script, make_card, spawn
from tests.web_server import ROOT, Web, serving


def stream(web: Web, prompt: list[int], num_tokens: int) -> tuple[int, str]:
    body = {"ids": [prompt], "max_tokens": num_tokens, "stream": True}
    answer = web.post("/v1/chat/completions", body)
    return answer.status_code, answer.text


def test_sigterm_lets_streams_finish_and_exits_0(tmp_path: Path) -> None:
    with (
        serving(tmp_path, num_workers=2) as web,
        FakeRunner(Script(web.endpoint, make_card(), 0.01)) as runner,
        requests.Session() as idle,
        ThreadPoolExecutor(16) as pool,
    ):
        web.wait_for_ping(200)
        idle.get(f"{web.url}/ping", timeout=5)
        asked = [pool.submit(stream, web, [number], 100) for number in range(100, 116)]
        runner.wait_until(lambda: runner.num_running == 16)
        web.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        for number, future in enumerate(asked, start=100):
            status, text = future.result()
            assert status == 200
            assert text.count(f'"t": [{number}]') == 100
            assert text.endswith("data: [DONE]\n\n")
        assert web.process.wait(10) == 0
        assert time.monotonic() - start < 6
        assert runner.aborts == []
        with pytest.raises(requests.ConnectionError):
            web.ping()


def test_sigterm_with_nothing_to_do_is_quick_despite_idle_connections(tmp_path: Path) -> None:
    with serving(tmp_path) as web, ExitStack() as stack:
        web.wait_for_ping(503)
        for _ in range(5):
            idle = stack.enter_context(requests.Session())
            idle.get(f"{web.url}/ping", timeout=5)
        silent = stack.enter_context(socket.create_connection(("127.0.0.1", web.port)))
        web.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert web.process.wait(10) == 0
        assert time.monotonic() - start < 4
        assert silent.recv(10) == b""


def test_what_outlasts_the_grace_period_is_told_so(tmp_path: Path) -> None:
    with (
        serving(tmp_path, graceful_timeout_s=4) as web,
        FakeRunner(Script(web.endpoint, make_card(), 0.01)) as runner,
        ThreadPoolExecutor(2) as pool,
    ):
        web.wait_for_ping(200)
        asked = pool.submit(stream, web, [5], 1_000_000)
        plain = pool.submit(web.post, "/generate", {"ids": [[6]], "max_tokens": 1_000_000})
        runner.wait_until(lambda: runner.num_running == 2)
        web.process.send_signal(signal.SIGTERM)
        status, text = asked.result()
        assert status == 200
        assert "shutting down" in text.split("\n\n")[-3]
        assert text.endswith("data: [DONE]\n\n")
        assert plain.result().status_code == 503
        assert web.process.wait(10) == 0
        runner.wait_until(lambda: runner.num_running == 0)


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"host": "127.0.0.1", "port": taken.getsockname()[1]}
        argument = {"settings": settings, "endpoint": f"ipc://{tmp_path}/r", "run_dir": "/tmp"}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.web_stand_in", json.dumps(argument)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert ended.returncode == 1
    [sentence] = ended.stderr.splitlines()
    assert "already in use" in sentence
    assert "--port" in sentence


def test_a_killed_runner_ends_streams_with_an_error_and_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path, num_workers=2) as web, ThreadPoolExecutor(12) as pool:
        (tmp_path / "phase").write_text("restarting the runner (killed by signal 9)")
        script = Script(web.endpoint, make_card(), 0.01)
        with spawn(script) as process:
            for _ in range(8):
                web.wait_for_ping(200)
            first = [started_stream(web, number) for number in range(10)]
            plain = pool.submit(web.post, "/generate", {"ids": [[6]], "max_tokens": 1_000_000})
            time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed_at = time.monotonic()
            texts = [pool.submit(rest_of, answer) for answer in first]
            for text in texts:
                last = text.result().split("\n\n")
                assert last[-2:] == ["data: [DONE]", ""]
                error = json.loads(last[-3].removeprefix("data: "))["error"]
                assert error["type"] == "server_error"
                assert "Traceback" not in error["message"]
            assert plain.result().status_code == 503
            assert time.monotonic() - killed_at < 2
            web.wait_for_ping(503, 2)
            reason = requests.get(f"{web.url}/ping", timeout=5).json()["error"]
            assert "killed by signal 9" in reason
            refused = web.post("/v1/chat/completions", {"ids": [[1]]})
            assert refused.status_code == 503
        with spawn(script):
            web.wait_for_ping(200, 5)
            while web.post("/generate", {"ids": [[1]]}).status_code != 200:
                assert time.monotonic() - killed_at < 10  # the other worker is not ready yet
        assert "Traceback" not in web.log.read_text()


def started_stream(web: Web, number: int) -> requests.Response:
    body = {"ids": [[number]], "max_tokens": 1_000_000, "stream": True}
    answer = web.post("/v1/chat/completions", body, stream=True)
    assert answer.status_code == 200
    return answer


def rest_of(answer: requests.Response) -> str:
    return b"".join(answer.iter_content(None)).decode()


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path) as web, FakeRunner(Script(web.endpoint, make_card())):
        web.wait_for_ping(200)
        children = Path(f"/proc/{web.process.pid}/task/{web.process.pid}/children")
        subprocess.run(["kill", "-9", children.read_text().split()[0]], check=True)
        deadline = time.monotonic() + 15
        while True:
            try:
                if web.ping() == 200:
                    break
            except requests.RequestException:
                assert time.monotonic() < deadline
        assert web.post("/generate", {"ids": [[1]]}).status_code == 200


def test_a_tokenizer_that_cannot_be_read_is_said_by_ping(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "container.web.server") as web,
        FakeRunner(Script(web.endpoint, make_card("/nowhere/tokenizer.json"))),
    ):
        web.wait_for_ping(503)
        deadline = time.monotonic() + 10
        while "tokenizer" not in (text := requests.get(f"{web.url}/ping", timeout=5).text):
            assert time.monotonic() < deadline, text
        assert web.ping() == 503


def test_workers_load_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, container.web.server, container.web.app, container.web.handlers;"
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules);"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_worker_starts_without_warnings(tmp_path: Path) -> None:
    with serving(tmp_path, "container.web.server") as web:
        web.wait_for_ping(503)
        assert web.log.read_text() == ""


def test_many_short_requests_on_many_connections(tmp_path: Path) -> None:
    with (
        serving(tmp_path, num_workers=2) as web,
        FakeRunner(Script(web.endpoint, make_card())),
        ThreadPoolExecutor(32) as pool,
    ):
        for _ in range(4):
            web.wait_for_ping(200)

        def ask(number: int) -> Any:
            with requests.Session() as session:
                return [
                    session.post(
                        f"{web.url}/invocations",
                        json={"inputs": "x", "ids": [[number, turn]]},
                        timeout=20,
                    ).json()["tokens"]
                    for turn in range(10)
                ]

        for number, found in enumerate(pool.map(ask, range(32))):
            assert found == [[[number, turn, number]] for turn in range(10)]
    assert threading.active_count() < 50
