"""serve as a process: what it starts, signals, restarts, exit codes, what it leaves behind.

The web and the runner are stand-ins (tests/stand_in.py). Must not know: HTTP answers, models.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import small_hub
from container import examples
from container.settings import Settings
from handler.runner.config import RunnerConfig
from stand_in import Box, is_running, until


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    one = Box(tmp_path)
    yield one
    one.close()


def test_children_get_their_settings_and_a_socket_to_meet_at(box: Box) -> None:
    box.started(
        "--dtype", "float32", "--max-total-tokens", "99", HF_TOKEN="hf_s", API_KEY="the-key"
    )
    told = box.told("web")
    settings = msgspec.convert(told["settings"], Settings)
    assert (settings.port, settings.max_total_tokens) == (box.port, 99)
    assert (settings.api_key, settings.hf_token) == ("the-key", None)
    config = msgspec.convert(box.told("runner"), RunnerConfig)
    assert config.endpoint == told["endpoint"]
    assert config.endpoint.startswith("ipc://")
    assert len(config.endpoint) < 100  # Unix sockets allow 107 bytes
    assert (config.model_dir, config.model_id) == (str(box.model), str(box.model))
    assert (config.dtype, config.max_total_tokens) == ("float32", 99)
    assert Path(config.scratch_dir).is_dir()
    for name in ("web.environ", "runner.environ"):
        environ = box.told(name)
        assert not {"hf_s", "the-key"} & set(environ.values())
        assert environ["HF_HUB_OFFLINE"] == environ["TRANSFORMERS_OFFLINE"] == "1"
    for pid in (box.pid("web"), box.pid("runner")):
        assert "the-key" not in Path(f"/proc/{pid}/cmdline").read_text()
    assert oct(Path(told["run_dir"]).stat().st_mode & 0o777) == "0o700"
    assert box.phase == "starting the runner"


def test_term_lets_requests_finish_and_stops_the_web_before_the_runner(box: Box) -> None:
    box.ask("web-busy")
    box.started()
    box.send(signal.SIGTERM)
    until(lambda: "server term" in box.events)
    assert is_running(box.pid("runner"))
    assert box.phase == "stopping"
    box.unask("web-busy")
    assert box.exit_code() == 0
    assert [event for event in box.events if not event.endswith("up")] == [
        "server term",
        "server end",
        "process term",
    ]


def test_nothing_is_left_behind(box: Box) -> None:
    assert box.started().stop() == 0
    assert list(box.temporary.iterdir()) == []
    assert not is_running(box.pid("web"))
    assert not is_running(box.pid("runner"))


def test_interrupt_is_term(box: Box) -> None:
    box.started().send(signal.SIGINT)
    assert box.exit_code() == 0
    assert "server int" not in box.events


def test_a_second_signal_is_quicker(box: Box) -> None:
    box.ask("web-busy")
    box.started("--graceful-timeout-s", "60")
    box.send(signal.SIGTERM)
    until(lambda: "server term" in box.events)
    box.send(signal.SIGTERM)
    assert box.exit_code(10) == 0
    assert "server int" in box.events


def test_what_does_not_stop_in_time_is_killed(box: Box) -> None:
    for wish in ("web-deaf", "runner-deaf"):
        box.ask(wish)
    box.started("--graceful-timeout-s", "0")
    assert box.stop() == 0
    assert not is_running(box.pid("web"))
    assert not is_running(box.pid("runner"))
    assert "killing it" in box.log


def test_a_runner_that_can_never_start_ends_everything_with_its_code(box: Box) -> None:
    box.ask("runner-code", "3")
    box.start()
    assert box.exit_code() == 3
    assert box.events.count("process up") == 1
    assert not is_running(box.pid("web"))


def test_a_killed_runner_comes_back_and_the_web_stays(box: Box) -> None:
    box.started()
    web, runner = box.pid("web"), box.pid("runner")
    os.kill(runner, signal.SIGKILL)
    until(lambda: "killed by signal 9" in box.phase)
    until(lambda: box.events.count("process up") == 2)
    assert box.pid("runner") != runner
    assert (box.pid("web"), is_running(web)) == (web, True)
    assert box.stop() == 0


def test_a_runner_that_keeps_crashing_uses_its_budget_up(box: Box) -> None:
    box.ask("runner-code", "9")
    box.start("--max-runner-restarts", "1")
    assert box.exit_code() == 1
    assert box.events.count("process up") == 2
    assert "exit code 9" in box.log
    assert not is_running(box.pid("web"))


def test_a_runner_that_leaves_without_being_told_is_started_again(box: Box) -> None:
    box.ask("runner-code", "0")
    box.start("--max-runner-restarts", "0")
    assert box.exit_code() == 1


def test_term_while_waiting_to_restart(box: Box) -> None:
    box.ask("runner-code", "9")
    box.start("--max-runner-restarts", "50")
    until(lambda: box.events.count("process up") == 3)
    assert box.stop() == 0


def test_without_the_web_everything_ends(box: Box) -> None:
    box.started()
    box.ask("web-dies")
    assert box.exit_code() == 1
    assert "exit code 7" in box.log
    assert not is_running(box.pid("runner"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_children_do_not_outlive_a_killed_launch(box: Box) -> None:
    box.started().send(signal.SIGKILL)
    box.exit_code()
    until(lambda: not is_running(box.pid("web")))
    until(lambda: not is_running(box.pid("runner")))


def test_nothing_in_the_working_or_model_folder_takes_a_modules_place(box: Box) -> None:
    for folder in (box.world, box.model):
        for name in ("container", "handler", "msgspec", "json", "logging"):
            (folder / f"{name}.py").write_text("raise SystemExit('shadowed')")
    assert box.started(cwd=box.model).stop() == 0


def test_an_archive_is_unpacked_while_the_web_answers_already(box: Box) -> None:
    archive = box.model.parent / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path in box.model.iterdir():
            tar.add(path, path.name)
    box.started(f"--model-id={archive}")
    config = msgspec.convert(box.told("runner"), RunnerConfig)
    assert Path(config.model_dir).is_relative_to(box.told("web")["run_dir"])
    assert config.model_id == str(archive)
    assert box.stop() == 0
    assert list(box.temporary.iterdir()) == []


def test_what_preparing_finds_wrong_ends_everything(box: Box) -> None:
    archive = box.model.parent / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(box.model / "tokenizer.json", "tokenizer.json")
    box.start(f"--model-id={archive}")
    assert box.exit_code() == 3
    assert "config.json is missing" in box.log
    assert "process up" not in box.events


@pytest.mark.parametrize("trust", ["false", "true"])
def test_a_model_from_the_hub(box: Box, trust: str) -> None:
    with small_hub.running() as hub:
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(box.temporary / "hf"), "HF_TOKEN": "hf_s"}
        box.started("--model-id=org/model", "--trust-remote-code", trust, **environ)
    config = msgspec.convert(box.told("runner"), RunnerConfig)
    assert (config.model_id, config.revision) == ("org/model", small_hub.COMMIT)
    assert Path(config.model_dir).is_relative_to(box.temporary / "hf")
    runner = box.told("runner.environ")
    # Code may have to be fetched from another repository; else nothing is fetched any more.
    assert ("HF_HUB_OFFLINE" in runner, "HF_TOKEN" in runner) == (trust == "false", trust == "true")
    assert "HF_TOKEN" not in box.told("web.environ")
    assert box.stop() == 0


def test_a_hub_that_refuses(box: Box) -> None:
    with small_hub.running() as hub:
        box.start("--model-id=org/gated", HF_ENDPOINT=hub.url, HF_HOME=str(box.temporary))
        assert box.exit_code() == 3
    assert "org/gated is gated" in box.log


def test_term_during_a_download_that_hangs(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_hub:
        url = f"http://127.0.0.1:{silent_hub.getsockname()[1]}"
        box.start("--model-id=org/model", HF_ENDPOINT=url, HF_HOME=str(box.temporary))
        silent_hub.settimeout(15)
        connection, _ = silent_hub.accept()
        until(lambda: "server up" in box.events)
        assert box.phase == "downloading org/model"
        assert box.stop() == 0
        connection.close()


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        (["--prot", "1"], 2, "--port"),
        (["--port", "x"], 2, "65535"),
        (["--model-id", "/no/such"], 3, "/no/such"),
        (["--tokenizer-config-path", "/no/such"], 3, "/no/such"),
    ],
)
def test_what_is_known_to_be_wrong_is_said_before_anything_starts(
    box: Box, flags: list[str], code: int, part: str
) -> None:
    box.start(*flags)
    assert box.exit_code() == code
    assert len(box.log.splitlines()) == 1
    assert part in box.log
    assert box.events == []


def test_examples_are_printed_once_the_model_answers(box: Box) -> None:
    box.started("--print-examples")
    assert "curl" not in box.log
    box.ask("ready")
    until(lambda: "boto3" in box.log)
    assert f"curl -N http://localhost:{box.port}/invocations" in box.log
    assert "model='the-model'" in box.log
    assert box.stop() == 0


@pytest.mark.parametrize("api_key", [None, "a key"])
def test_examples_work_as_they_are_printed(box: Box, api_key: str | None) -> None:
    box.started(*([] if api_key is None else ["--api-key", api_key]))
    settings = Settings(port=box.port, api_key=api_key)
    environ = {**os.environ, "API_KEY": api_key or ""}
    for command in (
        ["bash", "-c", examples.curl_call(settings)],
        [sys.executable, "-c", examples.openai_program(settings, "m")],
        [sys.executable, "-c", examples.boto3_program(settings)],
    ):
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert "hello True" in done.stdout, done.stderr
    posts = [event.split()[2] for event in box.events if "post" in event]
    assert posts == ["/invocations", "/v1/chat/completions", "/invocations"]


def test_the_log_may_be_json(box: Box) -> None:
    assert box.started(JSON_OUTPUT="true").stop() == 0
    lines = [json.loads(line) for line in box.log.splitlines()]
    assert {line["process"] for line in lines} == {"launch"}


def test_no_child_is_left_a_zombie_while_serving(box: Box) -> None:
    box.started()
    runner = box.pid("runner")
    os.kill(runner, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{runner}").exists())
    assert box.stop() == 0


def test_idle_costs_nothing(box: Box) -> None:
    box.started()
    assert box.process is not None
    pid = box.process.pid

    def cpu_ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = cpu_ticks()
    time.sleep(0.5)
    assert cpu_ticks() - before <= 1
