"""Finds stop strings in text that arrives in pieces, and holds back what may become one.

Must not know: tokens, the APIs.
"""

from collections.abc import Iterable


class StopStrings:
    """The stop strings of a request, prepared once (Aho-Corasick): O(1) per character of text."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self.moves: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [0]  # length of the longest stop string that ends here
        for word in self.words:
            self._add(word)
        self.fall = self._link()

    def _add(self, word: str) -> None:
        node = 0
        for letter in word:
            following = self.moves[node].get(letter)
            if following is None:
                following = len(self.moves)
                self.moves[node][letter] = following
                self.moves.append({})
                self.depth.append(self.depth[node] + 1)
                self.match.append(0)
            node = following
        self.match[node] = len(word)

    def _link(self) -> list[int]:
        fall = [0] * len(self.moves)
        queue = list(self.moves[0].values())
        for node in queue:
            self.match[node] = max(self.match[node], self.match[fall[node]])
            for letter, following in self.moves[node].items():
                fall[following] = self._next(fall, fall[node], letter)
                queue.append(following)
        return fall

    def _next(self, fall: list[int], node: int, letter: str) -> int:
        while node and letter not in self.moves[node]:
            node = fall[node]
        return self.moves[node].get(letter, 0)

    def step(self, node: int, letter: str) -> int:
        """The node after one more character: the longest end of the text that begins a word."""
        return self._next(self.fall, node, letter)


class StopMatcher:
    """Looks for stop strings in the text of one sequence.

    The match that ends first wins, and of those that end together the longest, so the answer does
    not depend on how the text was cut into tokens and never contains a whole stop string.
    """

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._node = 0
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Take text; what may be shown now. Once `matched`, the text has ended."""
        stops, node = self._stops, self._node
        for place, letter in enumerate(text):
            node = stops.step(node, letter)
            if stops.match[node]:
                self.matched = True
                shown = self._held + text[: place + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - stops.match[node]]
        self._node = node
        text = self._held + text
        # With the stop string kept in the answer there is nothing to hide, so nothing is held back.
        shown_length = len(text) if self._include else len(text) - stops.depth[node]
        self._held = text[shown_length:]
        return text[:shown_length]

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        text, self._held = self._held, ""
        return text
