"""The worker's end of the socket, against a scripted runner on a real socket."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gevent
import pytest

from handler.runner.client import (
    GenerationClosedError,
    RunnerClient,
    RunnerUnavailableError,
)
from handler.runner.protocol import Event, Failed, Finished, Generate, Tokens
from tests.fake_runner import Failure, FakeRunner, Script, make_card, spawn


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/r"


@pytest.fixture
def client(endpoint: str) -> Iterator[RunnerClient]:
    client = RunnerClient(endpoint)
    client.start()
    yield client
    client.stop()


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> float:
    """Let greenlets run until the condition holds; how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "it never happened"
        gevent.sleep(0.002)
    return time.monotonic() - start


def ask(*prompt_ids: int, tokens: int = 4) -> Generate:
    return Generate(request_id="", prompt_ids=list(prompt_ids), max_new_tokens=tokens)


def token_ids(events: list[tuple[int, Event]], index: int = 0) -> list[int]:
    return [
        token
        for at, event in events
        if at == index and isinstance(event, Tokens)
        for token in event.token_ids
    ]


def script(endpoint: str, step_s: float = 0.0, **rest: object) -> Script:
    return Script(endpoint, make_card(), step_s, **rest)  # type: ignore[arg-type]


def test_events_arrive_in_order_and_end_with_one_terminal(
    endpoint: str, client: RunnerClient
) -> None:
    with FakeRunner(script(endpoint)):
        until(lambda: client.card)
        events = list(client.submit([ask(5, 6, 7), ask(8, 9)]))
        assert token_ids(events, 0) == [5, 6, 7, 5]
        assert token_ids(events, 1) == [8, 9, 8, 9]
        terminals = [index for index, event in events if isinstance(event, Finished | Failed)]
        assert sorted(terminals) == [0, 1]
        assert client.num_unfinished == 0


def test_many_generations_at_once_do_not_cross(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint)):
        until(lambda: client.card)
        jobs = [
            gevent.spawn(lambda n=n: list(client.submit([ask(n, n + 1, tokens=20)])))
            for n in range(200)
        ]
        gevent.joinall(jobs, timeout=20, raise_error=True)
        for n, job in enumerate(jobs):
            assert token_ids(job.value) == [n, n + 1] * 10


def test_each_step_is_delivered_without_waiting_for_a_poll(
    endpoint: str, client: RunnerClient
) -> None:
    with FakeRunner(script(endpoint, step_s=0.01)) as runner:
        until(lambda: client.card)
        gaps = []
        last = time.monotonic()
        for _ in client.submit([ask(1, tokens=50)]):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            if len(gaps) % 7 == 0:
                client.submit([ask(2, tokens=1)])  # sends disturb the edge-triggered descriptor
        assert max(gaps) < 1.0
        assert runner.num_steps >= 50


def test_submit_without_a_runner_says_so(client: RunnerClient) -> None:
    assert client.card is None
    with pytest.raises(RunnerUnavailableError, match="waiting for the runner"):
        client.submit([ask(1)])


def test_the_phase_is_shown_until_the_runner_says_ready_unasked(
    endpoint: str, client: RunnerClient
) -> None:
    seen = []
    client.on_ready(seen.append)
    with FakeRunner(script(endpoint, loading="loading weights 42 %")) as runner:
        until(lambda: client.phase == "loading weights 42 %")
        assert client.card is None
        with pytest.raises(RunnerUnavailableError, match="42 %"):
            client.submit([ask(1)])
        runner.become_ready()
        assert until(lambda: client.card) < 0.9
        until(lambda: seen)
        assert seen == [client.card]


def test_a_runner_that_is_not_ready_is_asked_again(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint, loading="loading")) as runner:
        until(lambda: runner.num_hellos >= 2, 5.0)


def test_on_ready_after_the_fact(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint)):
        until(lambda: client.card)
        seen = []
        client.on_ready(seen.append)
        until(lambda: seen)


def test_cancel_stops_one_sequence(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint, step_s=0.005)) as runner:
        until(lambda: client.card)
        generation = client.submit([ask(1, tokens=10_000), ask(2, tokens=20)])
        seen = []
        for index, event in generation:
            seen.append((index, event))
            if index == 0 and len(token_ids(seen)) == 3:
                generation.cancel(0)
        assert token_ids(seen, 0) == [1, 1, 1]
        assert token_ids(seen, 1) == [2] * 20
        until(lambda: runner.aborts)
        assert runner.aborts[0][1] <= 5  # within two steps


def test_cancel_of_the_last_sequence_ends_the_iteration(
    endpoint: str, client: RunnerClient
) -> None:
    with FakeRunner(script(endpoint, step_s=0.005)) as runner:
        until(lambda: client.card)
        generation = client.submit([ask(1, tokens=10_000)])
        for _ in generation:
            generation.cancel(0)
        until(lambda: runner.num_running == 0)
        assert client.num_unfinished == 0


def test_close_aborts_and_ends_the_consumer(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint, step_s=0.005)) as runner:
        until(lambda: client.card)
        generation = client.submit([ask(1, tokens=10_000), ask(2, tokens=10_000)])
        consumer = gevent.spawn(list, generation)
        until(lambda: runner.num_steps >= 3)
        generation.close()
        generation.close()
        with pytest.raises(GenerationClosedError):
            consumer.get(timeout=2)
        until(lambda: len(runner.aborts) == 2)
        assert runner.num_running == 0


def test_close_after_the_end_sends_nothing(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint)) as runner:
        until(lambda: client.card)
        generation = client.submit([ask(1)])
        list(generation)
        generation.close()
        list(client.submit([ask(2)]))
        assert runner.aborts == []


def test_wait_shows_whether_anything_came(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint)) as runner:
        until(lambda: client.card)
        runner.hold()
        generation = client.submit([ask(1)])
        assert generation.wait(0.05) is False
        runner.release()
        assert generation.wait(5.0) is True
        assert client.submit([]).wait(0) is True


def test_a_failure_is_an_event(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint, failures=[Failure(7, "too_long", "too long")])):
        until(lambda: client.card)
        [(_, event)] = list(client.submit([ask(7)]))
        assert isinstance(event, Failed)
        assert (event.kind, event.message) == ("too_long", "too long")


def test_a_killed_runner_fails_what_runs_and_comes_back(
    endpoint: str, client: RunnerClient
) -> None:
    with spawn(script(endpoint, step_s=0.01)) as process:
        until(lambda: client.card)
        jobs = [
            gevent.spawn(lambda n=n: list(client.submit([ask(n, tokens=100_000)])))
            for n in range(1, 9)
        ]
        until(lambda: client.num_unfinished == 8)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert until(lambda: client.card is None) < 0.5
        gevent.joinall(jobs, timeout=2, raise_error=True)
        for job in jobs:
            last = job.value[-1][1]
            assert isinstance(last, Failed)
            assert last.kind == "unavailable"
        assert not client.connected
        with pytest.raises(RunnerUnavailableError):
            client.submit([ask(1)])
    with FakeRunner(script(endpoint)) as runner:
        until(lambda: client.card)
        assert token_ids(list(client.submit([ask(3, 4)]))) == [3, 4, 3, 4]
        assert [request.prompt_ids for request in runner.requests] == [[3, 4]]


def test_another_incarnation_means_that_requests_are_gone(
    endpoint: str, client: RunnerClient
) -> None:
    with FakeRunner(script(endpoint, step_s=0.01)) as runner:
        until(lambda: client.card)
        runner.hold()
        consumer = gevent.spawn(list, client.submit([ask(1, tokens=10_000)]))
        until(lambda: runner.num_running == 1)
        runner.start_over("another")
        last = consumer.get(timeout=5)[-1][1]
        assert isinstance(last, Failed)
        assert last.kind == "unavailable"
        runner.release()
        assert token_ids(list(client.submit([ask(3, tokens=2)]))) == [3, 3]


def test_fail_unfinished_ends_everything(endpoint: str, client: RunnerClient) -> None:
    with FakeRunner(script(endpoint, step_s=0.01)) as runner:
        until(lambda: client.card)
        consumer = gevent.spawn(list, client.submit([ask(1, tokens=10_000)]))
        until(lambda: runner.num_steps >= 1)
        client.fail_unfinished("stopping")
        assert consumer.get(timeout=2)[-1][1].message == "stopping"
        until(lambda: runner.num_running == 0)
