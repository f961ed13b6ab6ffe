"""Token ids to text, piece by piece and in whole characters only.

The pieces of a stream, joined, are the decoding of all its tokens at once. Decoders whose tokens
map to bytes one by one (byte-level BPE; sentencepiece with byte fallback) are replayed exactly and
in constant time per token; any other goes through the tokenizer over a short window.

Must not know: the protocol's events, stop strings, OpenAI, TGI.
"""

import codecs
import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
WINDOW = 4
"""Tokens that may hold back text while a character is incomplete: UTF-8 has at most four bytes."""

CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""What transformers' `clean_up_tokenization` replaces, in its order."""


class Detokenizer(Protocol):
    """Text of one sequence; the joined results are the decoding of all tokens pushed."""

    def push(self, token_id: int) -> str:
        """Take one token; the text that no later token can change."""
        ...

    def flush(self) -> str:
        """The rest, at the end of the sequence."""
        ...


class Vocabulary:
    """What each token id means as bytes and text, by the tokenizer's own decoder. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_token_ids: Iterable[int] = (),
        clean_up_spaces: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.special_token_ids = frozenset(special_token_ids)
        # transformers, too, leaves the text of BPE tokenizers alone: there the clean-up is damage.
        self._clean_up = clean_up_spaces and type(tokenizer.model).__name__ != "BPE"
        self._new, self._piece = _read_decoder(self)
        self._bytes: dict[int, bytes] = {}

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh decoder for one sequence."""
        detokenizer = self._new()
        if self._clean_up:
            detokenizer = _CleanedUp(detokenizer)
        if skip_special_tokens:
            detokenizer = _Skipping(detokenizer, self.special_token_ids)
        return detokenizer

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text; empty for an id the tokenizer does not know."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.tokenizer.id_to_token(token_id)
            found = b"" if token is None else self._piece(token_id, token)
            self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """The token alone as text; bytes that are no character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _read_decoder(vocabulary: Vocabulary) -> "tuple[Callable[[], Detokenizer], _Piece]":
    """How the tokenizer's decoder is replayed: a factory, and the bytes of one token."""
    decoder = vocabulary.tokenizer.decoder
    stages = _stages(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return (lambda: _ByteLevel(vocabulary)), _byte_level_piece
    if kinds == ["Metaspace"]:
        strips = stages[0]["prepend_scheme"] != "never"
        piece = _sentencepiece(stages[0]["replacement"], " ", byte_fallback=False)
        return (lambda: _Sentencepiece(vocabulary, strips_first_token=strips)), piece
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_left_strip(stages[3:]):
        pattern = stages[0]["pattern"].get("String")
        if pattern is not None:
            strip = (stages[3]["content"], stages[3]["start"]) if kinds[3:] else ("", 0)
            piece = _sentencepiece(pattern, stages[0]["content"], byte_fallback=True)
            return (lambda: _Sentencepiece(vocabulary, strip=strip)), piece
    return (
        lambda: _Windowed(vocabulary.tokenizer)
    ), lambda token_id, _: vocabulary.tokenizer.decode(
        [token_id], skip_special_tokens=False
    ).encode()


_Piece = Callable[[int, str], bytes]


def _stages(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for inner in decoder["decoders"] for stage in _stages(inner)]


def _is_left_strip(stages: list[dict[str, Any]]) -> bool:
    return not stages or (
        len(stages) == 1 and stages[0]["type"] == "Strip" and stages[0]["stop"] == 0
    )


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable letter (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return table


_BYTE_OF_LETTER = _byte_of_letter()


def _byte_level_piece(_: int, token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:  # an added token with letters outside the table stands for itself
        return token.encode()


def _sentencepiece(mark: str, space: str, *, byte_fallback: bool) -> _Piece:
    def piece(_: int, token: str) -> bytes:
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(mark, space).encode()

    return piece


class _ByteLevel:
    """Tokens are runs of bytes; text is their UTF-8, broken bytes as U+FFFD."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _Sentencepiece:
    """Tokens are text with a mark for the space, or single bytes where a character has no token.

    The tokenizer's own decoder turns a whole run of byte tokens into U+FFFD, one per byte, when any
    of it is broken. That needs the future; here the whole characters of such a run are kept, and
    only the broken bytes are replaced, one by one.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        strip: tuple[str, int] = ("", 0),
        strips_first_token: bool = False,
    ) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._strip, self._to_strip = strip
        self._strips_first_token = strips_first_token
        self._held = b""

    def push(self, token_id: int) -> str:
        piece = self._token_bytes(token_id)
        if len(piece) == 1 and piece >= b"\x80":
            return self._unindented(self._push_byte(piece))
        if not self._held and not self._to_strip and not self._strips_first_token:
            return piece.decode()
        text = piece.decode()
        if self._strips_first_token and piece:
            text = text.replace(" ", "")
            self._strips_first_token = False
        return self._unindented(self.flush() + text)

    def flush(self) -> str:
        broken, self._held = REPLACEMENT * len(self._held), b""
        return broken

    def _push_byte(self, byte: bytes) -> str:
        held = self._held + byte
        try:
            text = held.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                self._held = held
                return ""
            broken = self.flush()
            return broken + (self._push_byte(byte) if broken else REPLACEMENT)
        self._held = b""
        return text

    def _unindented(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip):
                self._to_strip = 0
            else:
                text = text[len(self._strip) :]
                self._to_strip -= 1
        return text


class _Windowed:
    """Any decoder: what the tokens since the last release add to the text of those before them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._id_to_token = tokenizer.id_to_token
        self._before: list[int] = []
        self._held: list[int] = []
        self._before_text = ""

    def push(self, token_id: int) -> str:
        if self._id_to_token(token_id) is None:
            return (
                ""  # as the tokenizer does; it would push what the text hangs on out of the window
            )
        self._held.append(token_id)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._held) < WINDOW:
            return ""
        return self._release(text)

    def flush(self) -> str:
        return self._release(self._text()) if self._held else ""

    def _text(self) -> str:
        return self._decode(self._before + self._held, skip_special_tokens=False)

    def _release(self, text: str) -> str:
        added = text[len(self._before_text) :]
        self._before = (self._before + self._held)[-WINDOW:]
        self._held = []
        self._before_text = self._decode(self._before, skip_special_tokens=False)
        return added


class _Skipping:
    """Leaves special tokens out, as `skip_special_tokens` of the tokenizer does."""

    def __init__(self, inner: Detokenizer, special_token_ids: frozenset[int]) -> None:
        self._push, self.flush = inner.push, inner.flush
        self._special_token_ids = special_token_ids

    def push(self, token_id: int) -> str:
        return "" if token_id in self._special_token_ids else self._push(token_id)


class _CleanedUp:
    """transformers' `clean_up_tokenization` over a stream."""

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._stages = [_StreamingReplace(old, new) for old, new in CLEAN_UPS]

    def push(self, token_id: int) -> str:
        text = self._inner.push(token_id)
        for stage in self._stages:
            text = stage.push(text)
        return text

    def flush(self) -> str:
        text = self._inner.flush()
        for stage in self._stages:
            text = stage.push(text) + stage.flush()
        return text


class _StreamingReplace:
    """`str.replace` over a stream: holds back only what may become a match."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        *done, rest = text.split(self._old)
        keep = _overlap(rest, self._old)
        self._held = rest[len(rest) - keep :]
        return self._new.join([*done, rest[: len(rest) - keep]])

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `word`."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
