"""Detokenising: the pieces add up to the whole, whatever the tokenizer."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from handler.text import REPLACEMENT, Vocabulary
from handler_support import (
    SPECIAL,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    word_piece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer([" hello", "world", "é", " 日本", "  two"])
BYTE_LEVEL.add_tokens([" added token", "日added"])
SENTENCEPIECE = sentencepiece_tokenizer()
WORD_PIECE = word_piece_tokenizer()


def clip_tokenizer() -> Tokenizer:
    """A decoder whose text of a token depends on whether it is the last: not in the tables."""
    tokenizer = Tokenizer(
        models.BPE(vocab={"he</w>": 0, "l": 1, "lo</w>": 2, "é</w>": 3}, merges=[])
    )
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"▁he": 0, "l": 1, "▁": 2, "lo▁é": 3}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def ids_of(tokenizer: Tokenizer, *, beyond: int = 2) -> st.SearchStrategy[list[int]]:
    """Any ids, a few of which the tokenizer does not know."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + beyond - 1), max_size=30)


def streamed(
    tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, clean_up: bool = False
) -> list[str]:
    vocabulary = Vocabulary(tokenizer, range(len(SPECIAL)), clean_up)
    detokenizer = vocabulary.detokenizer(skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@given(ids_of(BYTE_LEVEL), st.booleans())
def test_byte_level_pieces_are_the_whole(ids: list[int], skip: bool) -> None:
    pieces = streamed(BYTE_LEVEL, ids, skip=skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=40))
def test_no_piece_of_valid_text_has_half_a_character(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = streamed(BYTE_LEVEL, ids, skip=False)
    assert "".join(pieces) == text
    assert text.count(REPLACEMENT) == "".join(pieces).count(REPLACEMENT)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30), st.booleans())
def test_sentencepiece_pieces_are_the_whole(text: str, skip: bool) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    pieces = streamed(SENTENCEPIECE, ids, skip=skip)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


@given(ids_of(SENTENCEPIECE))
def test_sentencepiece_with_broken_bytes_loses_only_these(ids: list[int]) -> None:
    text = "".join(streamed(SENTENCEPIECE, ids))
    whole = SENTENCEPIECE.decode(ids)
    if REPLACEMENT not in whole:
        assert text == whole
    else:  # the library replaces all bytes of a run with a broken one in it
        assert text.count(REPLACEMENT) <= whole.count(REPLACEMENT)


@pytest.mark.parametrize(
    ("byte_values", "text"),
    [
        (b"\xf0\x9f\x98\x80", "😀"),
        (b"\xf0\x9f\x98", "\ufffd\ufffd\ufffd"),
        (b"\xe6\x97\xa5\xf0\x9f", "日\ufffd\ufffd"),
        (b"\xff\xe6\x97\xa5", "\ufffd日"),
        (b"\xe6\x97A", "\ufffd\ufffdA"),
        (b"\xc3\xc3\xa9", "\ufffdé"),
    ],
)
def test_sentencepiece_byte_tokens(byte_values: bytes, text: str) -> None:
    ids = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in byte_values]
    assert "".join(streamed(SENTENCEPIECE, ids)) == text


def test_sentencepiece_streams_each_character_once_it_is_whole() -> None:
    ids = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in "日本".encode()]
    assert streamed(SENTENCEPIECE, ids) == ["", "", "日", "", "", "本", ""]


@given(ids_of(WORD_PIECE), st.booleans(), st.booleans())
def test_word_piece_with_clean_up(ids: list[int], skip: bool, clean_up: bool) -> None:
    whole = WORD_PIECE.decode(ids, skip_special_tokens=skip)
    if clean_up:
        whole = cleaned_up(whole)
    assert "".join(streamed(WORD_PIECE, ids, skip=skip, clean_up=clean_up)) == whole


def cleaned_up(text: str) -> str:
    """transformers' rule, by its documented list."""
    for old in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(old, old.strip())
    return text


def test_clean_up_leaves_byte_pair_text_alone_as_transformers_does() -> None:
    ids = BYTE_LEVEL.encode("a . b", add_special_tokens=False).ids
    assert "".join(streamed(BYTE_LEVEL, ids, clean_up=True)) == "a . b"


@pytest.mark.parametrize("make", [clip_tokenizer, metaspace_tokenizer])
@given(ids=st.lists(st.integers(0, 3), max_size=12))
def test_other_decoders(make: "type[Tokenizer]", ids: list[int]) -> None:
    tokenizer = make()
    vocabulary = Vocabulary(tokenizer)
    detokenizer = vocabulary.detokenizer()
    pieces = [*map(detokenizer.push, ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_token_bytes_are_the_real_bytes() -> None:
    vocabulary = Vocabulary(BYTE_LEVEL, range(len(SPECIAL)))
    ids = BYTE_LEVEL.encode("é😀", add_special_tokens=False).ids
    assert b"".join(map(vocabulary.token_bytes, ids)) == "é😀".encode()
    assert vocabulary.token_text(SPECIAL.index("<|im_end|>")) == "<|im_end|>"
    assert vocabulary.token_bytes(10**6) == b""


def test_a_long_sequence_costs_the_same_per_token() -> None:
    ids = BYTE_LEVEL.encode("word 日本 " * 2000, add_special_tokens=False).ids
    started = time.perf_counter()
    assert "".join(streamed(BYTE_LEVEL, ids)) == "word 日本 " * 2000
    assert time.perf_counter() - started < 1


def test_the_demo_models_tokenizer(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = Vocabulary(tokenizer, [id_ for id_, token in added.items() if token.special])
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(draw.choice([300, tokenizer.get_vocab_size()])) for _ in range(30)]
        for skip in (True, False):
            detokenizer = vocabulary.detokenizer(skip_special_tokens=skip)
            text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
            assert text == tokenizer.decode(ids, skip_special_tokens=skip)
