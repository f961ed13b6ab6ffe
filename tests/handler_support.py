"""Small real tokenizers, a model card, and events from a list: what handler tests stand on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from handler.runner.protocol import (
    Event,
    Finished,
    FinishReason,
    Generate,
    ModelCard,
    PromptLogprobs,
    Tokens,
)
from handler.served_model import ServedModel, ServingLimits

# A machine that is busy with something else must not fail a property.
settings.register_profile("handler", deadline=None)
settings.load_profile("handler")

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
EOS = SPECIAL.index("<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters() -> list[str]:
    """The letter of each byte in byte-level BPE, by the library's own account."""
    by_letter = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    rest = iter(letter for letter in by_letter if letter not in letters.values())
    return [letters[byte] if byte in letters else next(rest) for byte in range(256)]


def byte_level_tokenizer(words: Sequence[str] = (), *, adds_bos: bool = False) -> Tokenizer:
    """Each byte is a token, and each of `words` (reached only by id, since there are no merges)."""
    letters = byte_letters()
    spelled = ["".join(letters[byte] for byte in word.encode()) for word in words]
    tokens = list(dict.fromkeys([*SPECIAL, *letters, *spelled]))
    tokenizer = Tokenizer(
        models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer, adds_bos)


def sentencepiece_tokenizer(words: Sequence[str] = ("▁", "▁hello", "lo", "é")) -> Tokenizer:
    """Llama-2 style: a mark for the space, byte tokens for characters without one of their own."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_special(tokenizer, adds_bos=False)


def word_piece_tokenizer() -> Tokenizer:
    """BERT-like: words joined by spaces, a prefix for word parts, spaces cleaned up."""
    words = ["hello", "##lo", "wor", "##ld", ".", ",", "n't", "'s", "'", "do", "?", "!", "é"]
    tokens = [*SPECIAL, *words]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _with_special(tokenizer, adds_bos=False)


def _with_special(tokenizer: Tokenizer, adds_bos: bool) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
        )
    return tokenizer


def make_card(folder: Path, tokenizer: Tokenizer | None = None, **changes: Any) -> ModelCard:
    """A card for the tokenizer, saved in the folder; a context of 256 tokens."""
    tokenizer = tokenizer or byte_level_tokenizer()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    fields: dict[str, Any] = {
        "model_id": "org/tiny",
        "revision": None,
        "model_type": "llama",
        "tokenizer_path": str(path),
        "special_tokens": {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"},
        "special_token_ids": list(range(len(SPECIAL))),
        "eos_token_ids": [EOS],
        "chat_templates": {"default": CHATML},
        "chat_template_source": "chat_template.jinja",
        "clean_up_tokenization_spaces": False,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_input_tokens": 255,
        "max_total_tokens": 256,
        "dtype": "float32",
        "device": "cpu",
        "device_name": "cpu",
        "attention": "gather",
        "kv_capacity_tokens": 4096,
        "max_batch_size": 8,
    }
    return ModelCard(**{**fields, **changes})


def make_model(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    limits: ServingLimits | None = None,
    **changes: Any,
) -> ServedModel:
    """A served model around `make_card`."""
    return ServedModel(make_card(folder, tokenizer, **changes), limits or ServingLimits("1.2.3"))


@dataclass
class FakeEvents:
    """An event source that plays a list, and nothing more of a sequence once it is cancelled."""

    events: Sequence[tuple[int, Event]]
    cancelled: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        return (pair for pair in self.events if pair[0] not in self.cancelled)

    def cancel(self, index: int) -> None:
        self.cancelled.append(index)


def play(
    tokenizer: Tokenizer,
    sequences: Sequence[Generate],
    scripts: Sequence[Sequence[int]],
    *,
    reason: FinishReason = "eos",
    seed: int | None = None,
) -> FakeEvents:
    """Events of a runner that says each script, one token per event, the sequences in turn."""
    vocab_size = tokenizer.get_vocab_size()
    events: list[tuple[int, Event]] = []
    for index, sequence in enumerate(sequences):
        if sequence.prompt_logprobs:
            values = [None, *[-0.5] * (len(sequence.prompt_ids) - 1)]
            events.append((index, PromptLogprobs(sequence.request_id, values)))
    for step in range(max(map(len, scripts)) + 1):
        for index, (sequence, script) in enumerate(zip(sequences, scripts, strict=True)):
            if step < len(script):
                events.append((index, _token_event(sequence, script[step], vocab_size)))
            elif step == len(script):
                finished = Finished(sequence.request_id, reason, seed, 0.25, 0.5, 2)
                events.append((index, finished))
    return FakeEvents(events)


def _token_event(sequence: Generate, token_id: int, vocab_size: int) -> Tokens:
    if sequence.logprobs is None:
        return Tokens(sequence.request_id, [token_id])
    top = [((token_id + place) % vocab_size, -0.1 - place) for place in range(sequence.logprobs)]
    return Tokens(sequence.request_id, [token_id], [-0.1], [top])
