"""Fields that a body has and its API has not: ignored, named in the debug log, hinted at in errors.

Clients of other servers send fields of theirs, so an unknown field alone is no error. Where a
request fails anyway, the sentence says which one looks like a known field misspelt.

Must not know: which fields there are, values of fields, HTTP.
"""

import difflib
import logging
from collections.abc import Collection, Iterable, Iterator

log = logging.getLogger(__name__)

MAX_NAMED = 16
MAX_NAME_LENGTH = 64
LIKENESS = 0.8
"""Of two names, by difflib's ratio: `max_new_tokens` and `max_tokens` have 0.83."""


def note(names: Iterable[str], fields: Collection[str], also_known: Collection[str]) -> None:
    """Name in the debug log what of a body's `names` is ignored, and what may have been meant."""
    if log.isEnabledFor(logging.DEBUG):
        unknown = [
            f"`{name}`" if meant is None else f"`{name}` (did you mean `{meant}`?)"
            for name, meant in _unknown(names, fields, also_known)
        ]
        if unknown:
            log.debug("unknown fields are ignored: %s", ", ".join(unknown))


def hint(names: Iterable[str], fields: Collection[str], also_known: Collection[str]) -> str:
    """A sentence on the first of `names` that looks misspelt; empty where none does."""
    for name, meant in _unknown(names, fields, also_known):
        if meant is not None:
            return f"`{name}` is not a known field; did you mean `{meant}`?"
    return ""


def _unknown(
    names: Iterable[str], fields: Collection[str], also_known: Collection[str]
) -> Iterator[tuple[str, str | None]]:
    """Unknown names, cut to a bearable length and number, each with the field most like it."""
    unknown = [name for name in names if name not in fields and name not in also_known]
    for name in unknown[:MAX_NAMED]:
        short = ascii(name[:MAX_NAME_LENGTH])[1:-1]
        alike = difflib.get_close_matches(short.lower(), fields, 1, LIKENESS)
        yield short, alike[0] if alike else None
