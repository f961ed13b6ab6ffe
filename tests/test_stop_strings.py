"""Stop strings: found at the same place however the text is cut, and never shown in part."""

import string
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from handler.stop_strings import StopMatcher, StopStrings

WORDS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=5)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the match that ends first, the longest of those: the slow, plain way."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found), end
    return None


@settings(deadline=None)
@given(st.lists(st.text("abc", max_size=5), max_size=10), WORDS, st.booleans())
def test_stop_strings_over_any_cuts(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(StopStrings(stops), include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched:
            break
    text = "".join(pieces)
    match = first_stop(text, stops)
    assert matcher.matched == (match is not None)
    if match is not None:
        assert shown == text[: match[1] if include else match[0]]
    else:
        assert shown + matcher.flush() == text


@settings(deadline=None)
@given(st.text("abc", max_size=20), WORDS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = "".join(map(matcher.push, text))
    if not matcher.matched:
        held = text[len(shown) :]
        beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
        longest = max((b for b in beginnings if text.endswith(b)), key=len)
        assert held == longest


def test_many_stop_strings_are_quick() -> None:
    stops = StopStrings([a + b + "x" * 20 for a in string.ascii_letters for b in "abcdef"])
    matcher = StopMatcher(stops)
    started = time.perf_counter()
    text = "".join(matcher.push("some ordinary words ") for _ in range(5000)) + matcher.flush()
    assert len(text) == 100_000
    assert time.perf_counter() - started < 1
