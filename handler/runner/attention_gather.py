"""Paged attention in plain torch: gather the pages, multiply. Any device, every feature.

Pages lie as (kv heads, pages, page_size, dim), so that one gather over the second dimension
gives each head's keys of all sequences back to back, ready for one batched product.

Must not know: transformers, scheduling.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from handler.runner.attention import (
    AttentionCall,
    LayerShape,
    PagedCache,
    PagedStep,
    page_table,
    step_slots,
)

if TYPE_CHECKING:
    from handler.runner.sequence import Chunk


SHORT_PAGES = 16
"""Contexts up to this many pages are taken together whatever their lengths."""


class GatherCache(PagedCache):
    """One key and one value tensor per layer."""

    name = "paged-torch"

    def __init__(
        self,
        layers: list[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.keys = [self._zeros(s.num_kv_heads, num_pages, s.key_dim) for s in layers]
        self.values = [self._zeros(s.num_kv_heads, num_pages, s.value_dim) for s in layers]

    def _zeros(self, num_heads: int, num_pages: int, dim: int) -> torch.Tensor:
        """Zeros, not whatever memory held: a masked weight of 0 times a NaN would still be NaN.

        On the CPU through an anonymous mapping, whose pages the kernel makes when they are first
        touched: torch.zeros would write, and so take, all of it at once.
        """
        shape = (num_heads, num_pages, self.page_size, dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        mapping = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize)
        return torch.frombuffer(mapping, dtype=self.dtype).view(shape)

    def ids(self, numbers: list[int]) -> torch.Tensor:
        """Whole numbers as an index on the cache's device."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def begin(self, chunks: list[Chunk]) -> GatherStep:
        """Chunks of one token must come first, in order of their context's length."""
        return GatherStep(self, chunks)


def _alike(chunks: list[Chunk], page_size: int) -> Iterator[list[Chunk]]:
    """Split decoding rows, shortest context first, into runs of similar length.

    A run is padded to its longest row, so none may be much shorter than that.
    """
    run: list[Chunk] = []
    for chunk in chunks:
        if run and chunk.end > max(2 * run[0].end, SHORT_PAGES * page_size):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


class _DecodeGroup:
    """Decoding rows `first`, `first + 1`, … of the step, padded to one width."""

    def __init__(self, first: int, chunks: list[Chunk], cache: GatherCache) -> None:
        table = page_table(chunks, cache.page_size)
        self.rows = slice(first, first + len(chunks))
        self.num_rows = len(chunks)
        self.width = len(table[0]) * cache.page_size
        self.pages = cache.ids([page for row in table for page in row])
        self._ends = cache.ids([chunk.end for chunk in chunks])
        self._dtype = cache.dtype
        self._biases: dict[tuple[int | None, int, int], torch.Tensor] = {}

    def bias(self, window: int | None, num_kv: int, group: int) -> torch.Tensor:
        """0 where a row sees a slot, -inf elsewhere: (num_kv * rows, group, width)."""
        found = self._biases.get((window, num_kv, group))
        if found is None:
            slots = torch.arange(self.width, device=self._ends.device)
            hidden = slots[None, :] >= self._ends[:, None]
            if window is not None:
                hidden |= slots[None, :] < self._ends[:, None] - window
            bias = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            bias = bias.masked_fill_(hidden, float("-inf"))[None, :, None, :]
            found = bias.expand(num_kv, -1, group, -1).reshape(-1, group, self.width)
            self._biases[window, num_kv, group] = found
        return found


class GatherStep(PagedStep):
    """One forward: decoding rows in batched products, each longer chunk on its own."""

    def __init__(self, cache: GatherCache, chunks: list[Chunk]) -> None:
        self.cache = cache
        self.slots = cache.ids(step_slots(chunks, cache.page_size))
        decodes = [chunk for chunk in chunks if chunk.length == 1]
        self.num_decodes = len(decodes)
        self.decode_groups: list[_DecodeGroup] = []
        first = 0
        for run in _alike(decodes, cache.page_size):
            self.decode_groups.append(_DecodeGroup(first, run, cache))
            first += len(run)
        self.prefills = [chunk for chunk in chunks if chunk.length > 1]
        self.prefill_pages = [
            cache.ids(page_table([chunk], cache.page_size)[0]) for chunk in self.prefills
        ]
        self._prefill_masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `PagedStep.attend`."""
        keys, values = self.cache.keys[call.layer], self.cache.values[call.layer]
        keys.flatten(1, 2).index_copy_(1, self.slots, call.key.to(keys.dtype))
        values.flatten(1, 2).index_copy_(1, self.slots, call.value.to(values.dtype))
        parts = [self._decode(call, group, keys, values) for group in self.decode_groups]
        start = self.num_decodes
        for index, chunk in enumerate(self.prefills):
            parts.append(self._prefill(call, index, start, keys, values))
            start += chunk.length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, call: AttentionCall, rows: _DecodeGroup, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """One group of decoding rows; returns (rows, heads, value_dim)."""
        num_kv, num_rows = keys.shape[0], rows.num_rows
        num_heads = call.query.shape[0]
        group = num_heads // num_kv  # query heads that share a key head
        k = keys.index_select(1, rows.pages).view(num_kv * num_rows, rows.width, -1)
        v = values.index_select(1, rows.pages).view(num_kv * num_rows, rows.width, -1)
        q = call.query[:, rows.rows].reshape(num_kv, group, num_rows, -1).transpose(1, 2)
        q = q.reshape(num_kv * num_rows, group, -1)
        bias = rows.bias(call.window, num_kv, group)
        if call.softcap is None:
            scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=call.scaling)
        else:
            scores = _cap(torch.bmm(q, k.transpose(1, 2)) * call.scaling, call.softcap) + bias
        sinks = None
        if call.sinks is not None:
            by_group = call.sinks.view(num_kv, 1, group, 1).expand(num_kv, num_rows, group, 1)
            sinks = by_group.reshape(num_kv * num_rows, group, 1)
        out = torch.bmm(_softmax(scores, sinks), v)
        return (
            out.view(num_kv, num_rows, group, -1).transpose(0, 1).reshape(num_rows, num_heads, -1)
        )

    def _prefill(
        self,
        call: AttentionCall,
        index: int,
        start: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """The chunk at `start` of the row; returns (length, heads, value_dim)."""
        chunk = self.prefills[index]
        here = slice(start, start + chunk.length)
        if chunk.start == 0:  # nothing earlier: what to see is in the call itself
            k, v = call.key[:, here], call.value[:, here]
        else:
            pages = self.prefill_pages[index]
            k = keys.index_select(1, pages).flatten(1, 2)[:, : chunk.end]
            v = values.index_select(1, pages).flatten(1, 2)[:, : chunk.end]
        num_kv = k.shape[0]
        q = call.query[:, here]
        q = q.reshape(num_kv, -1, *q.shape[1:])  # (num_kv, group, length, dim)
        k, v = k[:, None], v[:, None]
        visible = self._prefill_mask(index, call.window)
        if call.softcap is None and call.sinks is None:
            shape = (-1, q.shape[1], -1, -1)
            out = scaled_dot_product_attention(
                q, k.expand(shape), v.expand(shape), attn_mask=visible, scale=call.scaling
            )
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) * call.scaling
            if call.softcap is not None:
                scores = _cap(scores, call.softcap)
            scores = scores.masked_fill(~visible, float("-inf"))
            sinks = None
            if call.sinks is not None:
                sinks = call.sinks.view(num_kv, -1, 1, 1).expand(*scores.shape[:-1], 1)
            out = torch.matmul(_softmax(scores, sinks), v)
        return out.flatten(0, 1).transpose(0, 1)

    def _prefill_mask(self, index: int, window: int | None) -> torch.Tensor:
        """True where a token of the chunk sees an earlier one: (length, end)."""
        found = self._prefill_masks.get((index, window))
        if found is None:
            chunk = self.prefills[index]
            tokens = torch.arange(chunk.start, chunk.end, device=self.cache.device)[:, None]
            others = torch.arange(chunk.end, device=self.cache.device)[None, :]
            found = others <= tokens
            if window is not None:
                found &= others > tokens - window
            self._prefill_masks[index, window] = found
        return found


def _cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(scores / softcap) * softcap


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension, in float32; `sinks` (…, 1) take part and are left out."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
    joined = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    return torch.softmax(joined, dim=-1, dtype=torch.float32)[..., :-1].to(scores.dtype)
