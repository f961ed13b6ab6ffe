"""Attention over a paged key/value cache, called by transformers' models through its public
`AttentionInterface`.

A step's tokens are flattened to one row. The model hands each layer's queries, keys and values
to `paged_attention`, which passes them to the `PagedStep` that travels down the model's forward
as a keyword argument. The step writes keys and values to their pages and reads what each token
may see. Two implementations exist, chosen once at start: `attention_gather` (plain torch, any
device, every feature) and `attention_varlen` (torch's paged variable-length kernel on CUDA).

Must not know: scheduling, sampling, where a model comes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from handler.runner.sequence import Chunk

NAME = "invocant_paged"
"""The attention implementation's name inside transformers."""

STEP_KEYWORD = "paged_step"
"""The keyword argument of the model's forward that carries the `PagedStep`."""


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token, and which features it uses."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """A token sees itself and `window - 1` tokens before it; None: all."""
    softcap: float | None
    has_sinks: bool

    @property
    def values_per_token(self) -> int:
        """Numbers stored per token, keys and values together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call: queries (heads, T, key_dim); keys and values (kv heads, T, dim)."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    """(heads,): a logit per head that takes part in the softmax and yields nothing."""


class PagedStep(ABC):
    """What one forward needs of the cache."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the call's keys and values and return the outputs, (T, heads, value_dim)."""


class PagedCache(ABC):
    """The tensors of all layers' pages, and the way to attend over them."""

    name: str
    """For people, as `/info` shows it."""

    @abstractmethod
    def begin(self, chunks: list[Chunk]) -> PagedStep:
        """The step that computes these chunks, laid out one after the other in this order."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  part of transformers' signature
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls: query (1, heads, T, dim), key and value likewise.

    Signature and keywords are those of transformers' own attention functions.
    """
    step = kwargs.get(STEP_KEYWORD)
    if step is None:
        raise RuntimeError(f"{type(module).__name__} does not hand on {STEP_KEYWORD!r}")
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        query=query[0],
        key=key[0],
        value=value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return step.attend(call).unsqueeze(0), None


def register() -> None:
    """Make `NAME` usable as `attn_implementation`. No mask function goes with it: transformers
    then builds no mask, which is right, since the step knows what each token may see."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def step_positions(chunks: list[Chunk]) -> list[int]:
    """The position of each token of the step."""
    return [p for chunk in chunks for p in range(chunk.start, chunk.end)]


def step_slots(chunks: list[Chunk], page_size: int) -> list[int]:
    """Where each token's keys and values go: page * page_size + offset."""
    slots = []
    for chunk in chunks:
        pages = chunk.sequence.pages
        for p in range(chunk.start, chunk.end):
            slots.append(pages[p // page_size] * page_size + p % page_size)
    return slots


def page_table(chunks: list[Chunk], page_size: int) -> list[list[int]]:
    """The pages each chunk's sequence may look at, padded to one width with page 0."""
    needed = [-(-chunk.end // page_size) for chunk in chunks]
    width = max(needed)
    return [
        chunk.sequence.pages[:count] + [0] * (width - count)
        for chunk, count in zip(chunks, needed, strict=True)
    ]
