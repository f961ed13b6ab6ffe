"""Which page of the key/value cache belongs to whom: allocation, prefix reuse, eviction.

Pages are numbers; the tensors behind them are `attention`'s. A full page of tokens is entered
under (identity of the page before it, its tokens), so a lookup is exact and needs no hash of the
whole prefix. A page nobody uses stays findable until its memory is needed, oldest first.

Must not know: torch, requests, the order in which sequences run.
"""

from collections import OrderedDict

from handler.runner.sequence import Sequence

PrefixKey = tuple[int, tuple[int, ...]]
"""(identity of the page before, 0 at the start; the tokens of the page)."""


class PagePool:
    """Pages of `page_size` tokens, counted by reference, reused by prefix."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # Ordered by when a page was freed; a plain dict would be slow at giving its oldest key.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._num_users = [0] * num_pages
        self._key_of: dict[int, PrefixKey] = {}
        self._entries: dict[PrefixKey, tuple[int, int]] = {}  # key -> (page, identity)
        self._next_identity = 1

    @property
    def num_free(self) -> int:
        """Pages that can be had at once, findable ones included."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Give a sequence without pages the cached pages of its longest known prefix.

        At least the last token stays uncomputed: its logits are needed.
        """
        identity = 0
        for start in range(0, len(sequence.tokens) - self.page_size, self.page_size):
            tokens = tuple(sequence.tokens[start : start + self.page_size])
            entry = self._entries.get((identity, tokens))
            if entry is None:
                break
            page, identity = entry
            self._take(page)
            sequence.pages.append(page)
            sequence.prefix_ids.append(identity)
        sequence.num_computed = len(sequence.pages) * self.page_size

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens; False (and no change) if there is none."""
        num_missing = self.pages_for(num_tokens) - len(sequence.pages)
        if num_missing > len(self._free):
            return False
        for _ in range(num_missing):
            page = next(iter(self._free))
            self._forget(page)
            self._take(page)
            sequence.pages.append(page)
        return True

    def enter_prefix(self, sequence: Sequence) -> None:
        """Make the sequence's computed full pages findable for others."""
        size = self.page_size
        for index in range(len(sequence.prefix_ids), sequence.num_computed // size):
            parent = sequence.prefix_ids[-1] if sequence.prefix_ids else 0
            key = (parent, tuple(sequence.tokens[index * size : (index + 1) * size]))
            if key not in self._entries:
                self._entries[key] = (sequence.pages[index], self._next_identity)
                self._key_of[sequence.pages[index]] = key
                self._next_identity += 1
            # A twin computed at the same time keeps its own page but shares the identity, so
            # that both continue the same chain.
            sequence.prefix_ids.append(self._entries[key][1])

    def next_prefix(self, sequence: Sequence) -> PrefixKey | None:
        """What the sequence's first page that is not entered yet would be entered under.

        None when no full page of its tokens is left that another sequence could reuse.
        """
        start = len(sequence.prefix_ids) * self.page_size
        if start + self.page_size >= len(sequence.tokens):
            return None
        parent = sequence.prefix_ids[-1] if sequence.prefix_ids else 0
        return parent, tuple(sequence.tokens[start : start + self.page_size])

    def release(self, sequence: Sequence) -> None:
        """Take all pages back; they stay findable until their memory is needed."""
        # Last page first: a prefix is worth more than what follows it, so it is evicted later.
        for page in reversed(sequence.pages):
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self._free[page] = None
        sequence.pages.clear()
        sequence.prefix_ids.clear()
        sequence.num_computed = 0

    def _take(self, page: int) -> None:
        self._free.pop(page, None)
        self._num_users[page] += 1

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._entries[key]
