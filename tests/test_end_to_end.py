"""The whole container as its users meet it: real processes, a real socket, a real model."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import scripted_model as scripted
from scripted_model import TEXTS
from server_process import Server, Servers

NEW_TOKENS = 16
QUESTIONS = [
    "What is deep learning?",
    "Name the capital of France.",
    "Count from one to ten.",
    "Write a haiku about the sea.",
    "Explain gravity to a child, in one sentence. " * 12,
    "2 + 2 =",
    "¿Qué es la fotosíntesis?",
    "def fibonacci(n):",
]


def chat(server: Server, content: str, **own: Any) -> requests.Response:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **own}
    stream = bool(own.get("stream"))
    return requests.post(f"{server.url}/invocations", json=body, stream=stream, timeout=120)


def payloads(answer: requests.Response) -> Iterator[str]:
    """The data of each event, as it arrives."""
    for line in answer.iter_lines():
        if line:
            assert line.startswith(b"data: ")
            yield line.removeprefix(b"data: ").decode()


def streamed_text(answer: requests.Response) -> str:
    """The whole text of a chat stream that ended as it should."""
    assert answer.status_code == 200, answer.text
    found = list(payloads(answer))
    assert found[-1] == "[DONE]"
    deltas = [choice["delta"] for data in found[:-1] for choice in json.loads(data)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model with a context that its endless script does not fill within a test."""
    return scripted.build(tmp_path_factory.mktemp("models") / "endless", max_positions=100_000)


def runner_pid(server: Server) -> int:
    return int(re.findall(r"Started the runner \(process (\d+)\)", server.log)[-1])


def test_concurrent_greedy_chats_equal_generate(server: Servers, demo_model: Path) -> None:
    running = server(demo_model, "--dtype", "float32")
    contents = [f"{question} ({number})" for number in range(4) for question in QUESTIONS]
    with ThreadPoolExecutor(len(contents)) as pool:
        together = list(pool.map(lambda c: chat(running, c, max_tokens=NEW_TOKENS), contents))
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    for content, answer in zip(contents, together, strict=True):
        body = answer.json()
        conversation = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt"
        )
        output = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        expected = output[0, prompt["input_ids"].shape[1] :]
        assert body["choices"][0]["message"]["content"] == tokenizer.decode(
            expected, skip_special_tokens=True
        )
        assert body["usage"]["completion_tokens"] == len(expected)
        assert body["usage"]["prompt_tokens"] == prompt["input_ids"].shape[1]
    alone = chat(running, contents[4], max_tokens=NEW_TOKENS).json()
    assert alone["choices"] == together[4].json()["choices"]


def test_every_script_plays_right_streamed_and_whole(server: Servers, scripted_model: Path) -> None:
    running = server(scripted_model)
    for name, text in TEXTS.items():
        whole = chat(running, f"<<{name}>>", max_tokens=60).json()
        assert whole["choices"][0]["message"]["content"] == text, name
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert streamed_text(chat(running, f"<<{name}>>", max_tokens=60, stream=True)) == text


def test_many_streams_at_once_end_uncrossed(server: Servers, scripted_model: Path) -> None:
    running = server(scripted_model)
    names = [list(TEXTS)[i % len(TEXTS)] for i in range(64)]

    def play(name: str) -> str:
        return streamed_text(chat(running, f"<<{name}>>", max_tokens=60, stream=True))

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(play, names)) == [TEXTS[name] for name in names]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(
    server: Servers, endless_model: Path, stream: bool
) -> None:
    running = server(endless_model, "--max-batch-size", "1")
    if stream:
        answer = chat(running, "<<loop>>", stream=True)
        next(payloads(answer))
        answer.close()
    else:
        with pytest.raises(requests.Timeout):
            requests.post(f"{running.url}/invocations", json={"inputs": "<<loop>>"}, timeout=0.5)
    # The endless answer would hold the only slot for a hundred thousand steps.
    assert chat(running, "<<cjk>>").json()["choices"][0]["message"]["content"] == TEXTS["cjk"]


def test_sigterm_lets_streams_finish(server: Servers, scripted_model: Path) -> None:
    running = server(scripted_model)
    answer = chat(running, "<<loop>>", stream=True, max_tokens=200)
    events = payloads(answer)
    next(events)
    running.process.send_signal(signal.SIGTERM)
    rest = list(events)
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    running.stopped = True
    assert running.process.wait(30) == 0


def test_a_killed_runner_is_told_to_clients_and_comes_back(
    server: Servers, endless_model: Path
) -> None:
    running = server(endless_model)
    answer = chat(running, "<<loop>>", stream=True)
    events = payloads(answer)
    next(events)
    os.kill(runner_pid(running), signal.SIGKILL)
    rest = list(events)
    assert rest[-1] == "[DONE]"
    assert "error" in json.loads(rest[-2])
    running.wait_for_ping(503)
    assert chat(running, "<<cjk>>").status_code == 503
    running.wait_for_ping(200)
    assert chat(running, "<<cjk>>").json()["choices"][0]["message"]["content"] == TEXTS["cjk"]


def test_a_model_that_cannot_be_served_ends_the_process(server: Servers, tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "bloom")
    (tmp_path / "bloom" / "tokenizer.json").write_text("{}")
    running = server(tmp_path / "bloom", wait=False)
    running.stopped = True
    assert running.process.wait(60) == 3
    assert "'bloom'" in running.log
