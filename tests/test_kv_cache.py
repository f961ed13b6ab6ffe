"""Pages: allocation, prefix reuse, eviction, and no page ever with two writers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from handler.runner.kv_cache import PagePool
from handler.runner.sequence import Sequence

PAGE = 4


def computed(pool: PagePool, tokens: list[int]) -> Sequence:
    """A sequence whose tokens all have been computed and entered."""
    sequence = Sequence("s", tokens, 8)
    pool.reuse_prefix(sequence)
    assert pool.grow(sequence, len(tokens))
    sequence.num_computed = len(tokens)
    pool.enter_prefix(sequence)
    return sequence


def test_growing_takes_pages_and_releasing_gives_them_back() -> None:
    pool = PagePool(3, PAGE)
    sequence = Sequence("s", [1] * 9, 8)
    assert pool.grow(sequence, 9)
    assert pool.num_free == 0
    pool.release(sequence)
    assert pool.num_free == 3
    assert sequence.pages == []


def test_growing_beyond_what_is_free_changes_nothing() -> None:
    pool = PagePool(2, PAGE)
    sequence = Sequence("s", [1] * 9, 8)
    assert not pool.grow(sequence, 9)
    assert sequence.pages == []
    assert pool.num_free == 2


def test_a_known_prefix_is_shared_while_its_owner_lives() -> None:
    pool = PagePool(8, PAGE)
    first = computed(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = Sequence("t", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 8)
    pool.reuse_prefix(second)
    assert second.pages == first.pages[:2]
    assert second.num_computed == 8


def test_a_known_prefix_outlives_its_owner_until_its_memory_is_needed() -> None:
    pool = PagePool(3, PAGE)
    pool.release(computed(pool, [1, 2, 3, 4, 5]))
    again = Sequence("t", [1, 2, 3, 4, 5], 8)
    pool.reuse_prefix(again)
    assert again.num_computed == 4
    pool.release(again)
    pool.release(computed(pool, [9] * 12))
    late = Sequence("u", [1, 2, 3, 4, 5], 8)
    pool.reuse_prefix(late)
    assert late.num_computed == 0


def test_the_last_token_is_always_left_to_compute() -> None:
    pool = PagePool(4, PAGE)
    pool.release(computed(pool, [1, 2, 3, 4, 5, 6, 7, 8]))
    again = Sequence("t", [1, 2, 3, 4, 5, 6, 7, 8], 8)
    pool.reuse_prefix(again)
    assert again.num_computed == 4


def test_equal_pages_after_different_prefixes_are_not_confused() -> None:
    pool = PagePool(8, PAGE)
    computed(pool, [1, 1, 1, 1, 7, 7, 7, 7])
    other = Sequence("t", [2, 2, 2, 2, 7, 7, 7, 7, 0], 8)
    pool.reuse_prefix(other)
    assert other.pages == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_lives_never_lose_or_share_a_writable_page(data: st.DataObject) -> None:
    pool = PagePool(12, PAGE)
    alive: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if alive and data.draw(st.booleans()):
            pool.release(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
            sequence = Sequence("s", tokens, 8)
            pool.reuse_prefix(sequence)
            first_own = len(sequence.pages)
            if not pool.grow(sequence, len(tokens)):
                pool.release(sequence)
                continue
            own = set(sequence.pages[first_own:])
            assert not any(own & set(other.pages) for other in alive), "a page with two writers"
            sequence.num_computed = len(tokens)
            pool.enter_prefix(sequence)
            alive.append(sequence)
        used = {page for sequence in alive for page in sequence.pages}
        assert pool.num_free == pool.num_pages - len(used)
