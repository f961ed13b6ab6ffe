"""Paged attention through torch's variable-length kernel (`torch.nn.attention.varlen`, CUDA).

Needs torch >= 2.11 (paged `block_table` and `seqused_k`), half precision, equal key and value
dimensions up to 256, no soft caps and no sinks; `usable` says so. No compiled extension needed.

Must not know: transformers, scheduling.
"""

from __future__ import annotations

import logging

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
from handler.runner.sequence import Chunk, Sequence

logger = logging.getLogger(__name__)

PAGE_SIZE = 256
"""FlashAttention 2 takes pages whose size is a multiple of 256."""

MAX_HEAD_DIM = 256


def usable(layers: list[LayerShape], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this kernel can serve a model with these layers."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return _fits(layers) and _kernel_works(layers[0], dtype, device)


def _fits(layers: list[LayerShape]) -> bool:
    return all(
        s.softcap is None
        and not s.has_sinks
        and s.key_dim == s.value_dim <= MAX_HEAD_DIM
        and s.key_dim % 8 == 0
        for s in layers
    )


def _kernel_works(layer: LayerShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Try the paged kernel on this device against plain torch.

    Whether a build has it depends on the GPU and on the FlashAttention version torch was built
    with, and no public function tells; so ask the kernel itself.
    """
    sequence = Sequence("probe", list(range(PAGE_SIZE + 3)), 1)
    sequence.pages = [1, 0]
    chunks = [Chunk(sequence, 0, len(sequence.tokens))]
    generator = torch.Generator(device).manual_seed(0)
    shape = (layer.num_kv_heads, len(sequence.tokens), layer.key_dim)
    query, key, value = (
        torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(3)
    )
    scaling = layer.key_dim**-0.5
    call = AttentionCall(0, query, key, value, scaling, None, None, None)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    try:
        out = VarlenCache([layer], 2, dtype, device).begin(chunks).attend(call)
    except (RuntimeError, TypeError, ValueError) as error:
        logger.warning("torch's paged attention kernel cannot be used here: %s", error)
        return False
    return torch.allclose(out.transpose(0, 1), expected, atol=0.05, rtol=0.05)


class VarlenCache(PagedCache):
    """Pages lie as (pages, page_size, kv heads, dim), as the kernel wants them."""

    name = "paged-varlen (FlashAttention)"

    def __init__(
        self,
        layers: list[LayerShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = PAGE_SIZE
        self.device = device
        shapes = [(num_pages, PAGE_SIZE, s.num_kv_heads, s.key_dim) for s in layers]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    def begin(self, chunks: list[Chunk]) -> VarlenStep:
        """Any order of chunks will do."""
        return VarlenStep(self, chunks)


class VarlenStep(PagedStep):
    """One forward; the index tensors go to the device once for all layers."""

    def __init__(self, cache: VarlenCache, chunks: list[Chunk]) -> None:
        self.cache = cache
        bounds = [0]
        for chunk in chunks:
            bounds.append(bounds[-1] + chunk.length)
        device = cache.device
        self.slots = torch.tensor(step_slots(chunks, cache.page_size), device=device)
        self.bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        self.ends = torch.tensor([c.end for c in chunks], dtype=torch.int32, device=device)
        table = page_table(chunks, cache.page_size)
        self.table = torch.tensor(table, dtype=torch.int32, device=device)
        self.max_length = max(chunk.length for chunk in chunks)
        self.max_end = max(chunk.end for chunk in chunks)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `PagedStep.attend`."""
        from torch.nn.attention.varlen import varlen_attn

        keys, values = self.cache.keys[call.layer], self.cache.values[call.layer]
        keys.flatten(0, 1).index_copy_(0, self.slots, call.key.transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self.slots, call.value.transpose(0, 1))
        out = varlen_attn(
            call.query.transpose(0, 1).contiguous(),
            keys,
            values,
            self.bounds,
            None,
            self.max_length,
            self.max_end,
            scale=call.scaling,
            # The kernel counts the tokens before the query's own; right 0 makes it causal.
            window_size=(-1 if call.window is None else call.window - 1, 0),
            enable_gqa=keys.shape[2] != call.query.shape[0],
            seqused_k=self.ends,
            block_table=self.table,
        )
        assert isinstance(out, torch.Tensor)  # a tuple comes only with return_aux
        return out
