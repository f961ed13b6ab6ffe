"""Each accepted request gets exactly one terminal event, whatever happens to it."""

from collections.abc import Iterator

import pytest
import torch

from handler.runner.engine import Engine, EngineLimits
from handler.runner.inflight import Requests
from handler.runner.model import PagedModel
from handler.runner.protocol import Event, Failed, Finished, Generate, Sampling, Tokens
from handler.runner.sequence import Chunk
from tiny_models import VOCABULARY, make_paged_llama

WORKER, OTHER_WORKER = b"worker", b"other worker"


class FragileModel(PagedModel):
    """Fails at the next forward once told to."""

    is_broken = False

    def forward(self, chunks: list[Chunk], rows: list[int]) -> torch.Tensor:  # type: ignore[override]
        if self.is_broken:
            self.is_broken = False
            raise RuntimeError("device hiccup")
        return super().forward(chunks, rows)


@pytest.fixture(scope="module")
def model() -> FragileModel:
    return FragileModel(make_paged_llama())


@pytest.fixture
def engine(model: FragileModel) -> Engine:
    return Engine(model, frozenset(), EngineLimits(64, 63, 2, 16, num_pages=16))


@pytest.fixture
def requests(engine: Engine) -> Requests:
    return Requests(engine, VOCABULARY, max_concurrent=3)


def ask(request_id: str, num_new: int = 4, **own: object) -> Generate:
    return Generate(request_id, [5, 6, 7], num_new, **{"sampling": Sampling(temperature=0), **own})  # type: ignore[arg-type]


def drain(requests: Requests) -> Iterator[tuple[bytes, Event]]:
    while requests.has_work:
        yield from requests.step()


def test_events_go_to_their_worker_and_end_once(requests: Requests) -> None:
    # Two workers may pick the same id: ids are unique per worker only.
    assert requests.submit(WORKER, ask("1", 4)) == []
    assert requests.submit(OTHER_WORKER, ask("1", 2)) == []
    events = list(drain(requests))
    for worker, num_tokens in ((WORKER, 4), (OTHER_WORKER, 2)):
        own = [event for owner, event in events if owner == worker]
        assert sum(isinstance(event, Tokens) for event in own) == num_tokens
        assert [type(event) for event in own].count(Finished) == 1
        assert isinstance(own[-1], Finished)
        assert own[-1].reason == "length"


def test_more_than_the_limit_is_refused_until_one_ends(requests: Requests) -> None:
    for number in range(3):
        assert requests.submit(WORKER, ask(str(number))) == []
    (refusal,) = requests.submit(OTHER_WORKER, ask("late"))
    assert isinstance(refusal, Failed)
    assert refusal.kind == "overloaded"
    requests.abort(WORKER, "0")
    assert requests.submit(OTHER_WORKER, ask("late")) == []
    assert sum(isinstance(event, Finished) for _, event in drain(requests)) == 3


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Generate("x", [5, VOCABULARY], 4), f"{VOCABULARY} in prompt"),
        (Generate("x", [5, -1], 4), "-1 in prompt"),
        (ask("x", stop_token_ids=[VOCABULARY + 9]), f"{VOCABULARY + 9} in stop_token_ids"),
        (ask("x", sampling=Sampling(logit_bias={-3: 1.0})), "-3 in logit_bias"),
        (ask("x", num_new=1000), "at most 64"),
    ],
)
def test_what_can_never_run_is_refused(requests: Requests, request_: Generate, words: str) -> None:
    (refusal,) = requests.submit(WORKER, request_)
    assert isinstance(refusal, Failed)
    assert refusal.kind in ("invalid", "too_long")
    assert words in refusal.message
    assert not requests.has_work


def test_a_failed_step_fails_those_who_ran_and_no_other(
    requests: Requests, model: FragileModel, engine: Engine
) -> None:
    for number in range(3):  # two run, one waits
        requests.submit(WORKER, ask(str(number)))
    list(requests.step())
    model.is_broken = True
    failed = [event for _, event in requests.step()]
    assert [type(event) for event in failed] == [Failed, Failed]
    assert all(event.kind == "internal" for event in failed if isinstance(event, Failed))
    rest = [event for _, event in drain(requests)]
    assert {event.request_id for event in rest} == {"2"}
    assert isinstance(rest[-1], Finished)
    assert engine.pool.num_free == 16


def test_a_worker_that_is_gone_takes_its_requests_along(requests: Requests, engine: Engine) -> None:
    requests.submit(WORKER, ask("1"))
    requests.submit(OTHER_WORKER, ask("2"))
    list(requests.step())
    requests.abort_all(WORKER)
    assert {owner for owner, _ in drain(requests)} == {OTHER_WORKER}
    assert engine.pool.num_free == 16


def test_a_drawn_seed_is_told_and_repeats(requests: Requests) -> None:
    requests.submit(WORKER, ask("1", 8, sampling=Sampling(temperature=1.5)))
    first = [event for _, event in drain(requests)]
    assert isinstance(first[-1], Finished)
    assert first[-1].seed is not None
    again = Sampling(temperature=1.5, seed=first[-1].seed)
    requests.submit(WORKER, ask("2", 8, sampling=again))
    second = [event for _, event in drain(requests)]

    def tokens(events: list[Event]) -> list[int]:
        return [t for event in events if isinstance(event, Tokens) for t in event.token_ids]

    assert tokens(first) == tokens(second)
