"""Builds a tiny Llama checkpoint whose greedy output is written beforehand, for tests.

Attention and MLP add nothing to the residual stream, so the logits depend on the current token
alone: every token has one fixed successor. A prompt whose last token is `trigger("emoji")` plays
the script called emoji; the chat template repeats the last message at the end of the prompt, so
the user content `<<emoji>>` does the same over chat. Under 2 MB, made in a second.

Must not know: the product. Run as a program it writes a model for trying things by hand.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

Kind = Literal["bytelevel", "metaspace"]
Piece = str | bytes
"""One token: text, or raw bytes that are only part of a character."""

UNKNOWN, BOS, END_OF_TURN, END_OF_MESSAGE, SEPARATOR = "<unk>", "<s>", "<eot>", "<eom>", "<sep>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (UNKNOWN, BOS, END_OF_TURN, END_OF_MESSAGE, SEPARATOR, *(f"<{role}>" for role in ROLES))

SCRIPTS: dict[str, list[Piece]] = {
    "emoji": [" grin ", b"\xf0", b"\x9f", b"\x98", b"\x81", " done"],
    "cjk": [" kanji:", b"\xe6\xbc", b"\xa2", b"\xe5\xad", b"\x97", "。"],
    "broken": [" cut", b"\xf0\x9f", " off"],
    "stop_split": [" red", " gr", "een", " bl", "ue", " white"],
    "stop_almost": [" four", " fi", "g", " six"],
    "stop_joined": [" k1", "QX", "QY", " k2"],
    "special": [" before", SEPARATOR, " after"],
    "eos_list": [" seen", END_OF_MESSAGE, " UNSEEN"],
    "spaces": [" hey", "there", "  wide", "   "],
    "newlines": ["\n", "\n\n", "row"],
    "empty": [],
    "one_call": ["<call>", '{"name": "now", ', '"arguments": {}}', "</call>"],
    "json": ['{"state"', ': "fine"}'],
    "long": [f" w{number}" for number in range(40)],
    "loop": [" la"],
}
METASPACE_SCRIPTS: dict[str, list[Piece]] = {
    name: SCRIPTS[name]
    for name in ("emoji", "cjk", "spaces", "stop_split", "empty", "long", "loop")
}
"""What the SentencePiece-like tokenizer plays too."""

ENDLESS = "loop"
"""The one script that never ends: its last token follows itself."""

TEXTS = {
    "emoji": " grin 😁 done",
    "cjk": " kanji:漢字。",
    "broken": " cut\ufffd off",
    "stop_split": " red green blue white",
    "stop_almost": " four fig six",
    "stop_joined": " k1QXQY k2",
    "special": " before after",
    "eos_list": " seen",
    "spaces": " heythere  wide   ",
    "newlines": "\n\n\nrow",
    "empty": "",
    "one_call": '<call>{"name": "now", "arguments": {}}</call>',
    "json": '{"state": "fine"}',
    "long": "".join(f" w{number}" for number in range(40)),
}
"""What a client must read (special tokens left out); the endless script has no whole text.

The same for both tokenizers, where the text is read as what follows the prompt: decoded alone, a
SentencePiece-like tokenizer drops the first space."""

LIKELY, RUNNER_UP = 12.0, 9.0
"""Logit of the scripted successor, and of the lone byte 0xE2; every other token has 0."""

CHAT_TEMPLATE = (
    BOS + "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    f"{END_OF_TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}<assistant>{{ messages[-1].content }}{% endif %}"
)


def trigger(name: str) -> str:
    """The token after which the script `name` plays."""
    return f"<<{name}>>"


def scripts_of(kind: Kind) -> dict[str, list[Piece]]:
    """The scripts that a tokenizer of this kind plays."""
    return SCRIPTS if kind == "bytelevel" else METASPACE_SCRIPTS


def build(
    folder: Path, *, kind: Kind = "bytelevel", add_bos: bool = False, max_positions: int = 256
) -> Path:
    """Write the model into `folder` (made where missing) and return it.

    `add_bos`: the tokenizer puts BOS before a text on its own, as Llama's does.
    `max_positions`: the context length in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = make_vocabulary(kind)
    make_tokenizer(kind, vocabulary, add_bos).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END_OF_TURN,
        "unk_token": UNKNOWN,
        "pad_token": END_OF_TURN,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    make_network(kind, vocabulary, max_positions).save_pretrained(folder)
    return folder


def token_of(kind: Kind, piece: Piece) -> str:
    """How the vocabulary spells `piece`."""
    if piece in SPECIAL:
        return str(piece)
    if kind == "metaspace":
        if isinstance(piece, bytes):
            raise ValueError("a byte-fallback vocabulary has single bytes only; see tokens_of")
        return piece.replace(" ", "\u2581")
    raw = piece if isinstance(piece, bytes) else piece.encode()
    return "".join(BYTE_CHARACTERS[byte] for byte in raw)


def tokens_of(kind: Kind, pieces: Sequence[Piece]) -> list[str]:
    """The tokens of a script; byte-fallback vocabularies spell each byte as its own token."""
    tokens: list[str] = []
    for piece in pieces:
        if kind == "metaspace" and isinstance(piece, bytes):
            tokens += [f"<0x{byte:02X}>" for byte in piece]
        else:
            tokens.append(token_of(kind, piece))
    return tokens


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_CHARACTERS = byte_characters()


def make_vocabulary(kind: Kind) -> dict[str, int]:
    """Every token and its id: special ones, bytes, script pieces, triggers, padding to 64."""
    tokens = list(SPECIAL)
    if kind == "bytelevel":
        tokens += BYTE_CHARACTERS
        tokens += [token_of(kind, " l")]  # so that a prompt's " la" becomes the loop's token
    else:
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        tokens += ["\u2581", *map(chr, range(ord("!"), ord("~") + 1))]
    for name, pieces in scripts_of(kind).items():
        tokens += [*tokens_of(kind, pieces), trigger(name)]
    tokens = list(dict.fromkeys(tokens))
    tokens += [f"<unused{number}>" for number in range(-len(tokens) % 64)]
    return {token: index for index, token in enumerate(tokens)}


def make_tokenizer(kind: Kind, vocabulary: dict[str, int], add_bos: bool) -> Tokenizer:
    """A byte-level tokenizer (GPT-2's kind), or one like SentencePiece's with byte fallback."""
    space, space_l = (token_of("bytelevel", text) for text in (" ", " l"))
    merges = [(space, "l"), (space_l, "a")] if kind == "bytelevel" else []
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=UNKNOWN,
            byte_fallback=kind == "metaspace",
            fuse_unk=False,
        )
    )
    if kind == "bytelevel":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(trigger(n), normalized=False) for n in scripts_of(kind)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
        )
    return tokenizer


def successors(kind: Kind, vocabulary: dict[str, int]) -> list[int]:
    """For each token id the id that follows it; what no script names ends the turn."""
    following = [vocabulary[END_OF_TURN]] * len(vocabulary)
    linked: set[int] = set()
    for name, pieces in scripts_of(kind).items():
        ids = [vocabulary[token] for token in (trigger(name), *tokens_of(kind, pieces))]
        end = ids[-1] if name == ENDLESS else vocabulary[END_OF_TURN]
        for current, successor in zip(ids, [*ids[1:], end], strict=True):
            if current in linked and following[current] != successor:
                raise ValueError(f"script {name}: one of its tokens has another successor already")
            linked.add(current)
            following[current] = successor
    return following


def make_network(kind: Kind, vocabulary: dict[str, int], max_positions: int) -> LlamaForCausalLM:
    """One layer that adds nothing; embeddings and head make the logits of `successors`."""
    size, hidden = len(vocabulary), 512
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        bos_token_id=vocabulary[BOS],
        eos_token_id=vocabulary[END_OF_TURN],
        pad_token_id=vocabulary[END_OF_TURN],
    )
    network = LlamaForCausalLM(config)
    # Rows of +1 and -1 have the norm that RMSNorm gives every row, so it changes nothing.
    signs = torch.randint(0, 2, (size, hidden), generator=torch.Generator().manual_seed(1))
    embedding = signs.double() * 2 - 1
    logits = torch.zeros(size, size, dtype=torch.float64)
    lone_byte = vocabulary["<0xE2>" if kind == "metaspace" else BYTE_CHARACTERS[0xE2]]
    logits[:, lone_byte] = RUNNER_UP
    logits[torch.arange(size), torch.tensor(successors(kind, vocabulary))] = LIKELY
    # With more dimensions than tokens the rows are independent, so a head with exactly these
    # logits exists.
    head = torch.linalg.lstsq(embedding, logits, driver="gelsd").solution.T
    with torch.no_grad():
        network.model.embed_tokens.weight.copy_(embedding)
        network.lm_head.weight.copy_(head)
        network.model.layers[0].self_attn.o_proj.weight.zero_()
        network.model.layers[0].mlp.down_proj.weight.zero_()
    generation = network.generation_config
    generation.eos_token_id = [vocabulary[END_OF_TURN], vocabulary[END_OF_MESSAGE]]
    generation.do_sample = False
    return network


def main() -> None:
    """Write one model and print its folder."""
    parser = argparse.ArgumentParser(description="Write a model with scripted answers.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=("bytelevel", "metaspace"), default="bytelevel")
    parser.add_argument("--add-bos", action="store_true")
    parser.add_argument("--max-positions", type=int, default=256)
    options = parser.parse_args()
    print(
        build(
            options.folder,
            kind=options.kind,
            add_bos=options.add_bos,
            max_positions=options.max_positions,
        )
    )


if __name__ == "__main__":
    main()
