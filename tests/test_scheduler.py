"""Who runs when: admission, chunks, preemption. No torch, no time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from handler.runner.kv_cache import PagePool
from handler.runner.scheduler import Scheduler
from handler.runner.sequence import Sequence, State


def make(num_pages: int = 64, batch: int = 4, prefill: int = 8) -> Scheduler:
    return Scheduler(PagePool(num_pages, 4), batch, prefill)


def sequence(name: str, num_tokens: int, first_token: int = 0) -> Sequence:
    # Distinct tokens, so that no prefix is shared unless a test wants it.
    return Sequence(name, list(range(first_token, first_token + num_tokens)), 100)


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step as the engine would do it: (name, start, length) of each chunk."""
    chunks = scheduler.schedule()
    scheduler.complete(chunks)
    for chunk in chunks:
        if chunk.samples:
            chunk.sequence.tokens.append(7)
    return [(c.sequence.request_id, c.start, c.length) for c in chunks]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    scheduler = make()
    scheduler.add(sequence("short", 3, 100))
    assert step(scheduler) == [("short", 0, 3)]
    scheduler.add(sequence("long", 20, 200))
    assert step(scheduler) == [("short", 3, 1), ("long", 0, 8)]
    assert step(scheduler) == [("short", 4, 1), ("long", 8, 8)]
    assert step(scheduler) == [("short", 5, 1), ("long", 16, 4)]
    assert step(scheduler) == [("short", 6, 1), ("long", 20, 1)]


def test_several_prompts_share_one_step() -> None:
    scheduler = make()
    for index in range(3):
        scheduler.add(sequence(str(index), 3, 100 * index))
    assert step(scheduler) == [("0", 0, 3), ("1", 0, 3), ("2", 0, 2)]
    # Rows of one token are laid out by context length.
    assert step(scheduler) == [("2", 2, 1), ("0", 3, 1), ("1", 3, 1)]


def test_the_batch_size_bounds_what_runs() -> None:
    scheduler = make(batch=2)
    for index in range(3):
        scheduler.add(sequence(str(index), 1, 100 * index))
    assert len(step(scheduler)) == 2
    scheduler.remove(scheduler.running[0])
    assert ("2", 0, 1) in step(scheduler)


def test_what_does_not_fit_now_waits_and_keeps_its_turn() -> None:
    scheduler = make(num_pages=4)
    scheduler.add(sequence("first", 8, 0))
    scheduler.add(sequence("big", 12, 100))
    scheduler.add(sequence("small", 1, 200))
    assert step(scheduler) == [("first", 0, 8)]
    assert [s.request_id for s in scheduler.waiting] == ["big", "small"]
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == [("big", 0, 8)]


def test_without_a_page_the_newest_gives_way_and_is_computed_again() -> None:
    scheduler = make(num_pages=4)
    old, new = sequence("old", 7, 0), sequence("new", 8, 100)
    scheduler.add(old)
    scheduler.add(new)
    step(scheduler)
    step(scheduler)
    while new.state is State.RUNNING:
        step(scheduler)
    assert old.state is State.RUNNING
    assert scheduler.waiting[0] is new
    assert new.num_computed == 0
    scheduler.remove(old)
    assert step(scheduler)[0][0] == "new"
    assert new.state is State.RUNNING


def test_a_prefix_computed_before_is_skipped() -> None:
    scheduler = make()
    first = sequence("first", 8)
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    scheduler.add(sequence("second", 8))
    assert step(scheduler) == [("second", 4, 4)]
    assert scheduler.running[0].num_cached == 4


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    scheduler = make(prefill=8)
    for name in ("first", "twin", "other twin"):
        scheduler.add(sequence(name, 14))
    scheduler.add(sequence("unrelated", 2, 500))
    assert step(scheduler) == [("first", 0, 8)]
    assert step(scheduler) == [("first", 8, 6), ("unrelated", 0, 2)]
    # 12 of 14 tokens fill pages; each twin computes the last two itself.
    assert step(scheduler)[2:] == [("twin", 12, 2), ("other twin", 12, 2)]


def test_a_twin_goes_on_alone_when_the_first_leaves() -> None:
    scheduler = make(prefill=8)
    first, twin = sequence("first", 20), sequence("twin", 20)
    scheduler.add(first)
    scheduler.add(twin)
    step(scheduler)
    scheduler.remove(first)
    assert step(scheduler) == [("twin", 8, 8)]


def test_removing_works_in_every_state() -> None:
    scheduler = make(batch=1)
    running, waiting = sequence("running", 2), sequence("waiting", 2, 50)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert not scheduler.has_work
    assert scheduler.pool.num_free == scheduler.pool.num_pages


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(13, 40),
)
def test_every_sequence_ends_whatever_the_memory(
    shapes: list[tuple[int, int]], num_pages: int
) -> None:
    scheduler = make(num_pages=num_pages)
    wanted = {}
    for index, (num_prompt, num_new) in enumerate(shapes):
        item = sequence(str(index), num_prompt, 1000 * index)
        wanted[item] = num_prompt + num_new
        scheduler.add(item)
    for _ in range(2000):
        if not scheduler.has_work:
            break
        step(scheduler)
        for item in list(scheduler.running):
            if len(item.tokens) >= wanted[item]:
                scheduler.remove(item)
    assert not scheduler.has_work
    assert scheduler.pool.num_free == num_pages
