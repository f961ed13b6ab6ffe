"""From a `RunnerConfig` to an engine that is ready to step, and the model card that describes it.

Must not know: sockets, sequences in flight.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from handler.runner import memory
from handler.runner.config import RunnerConfig
from handler.runner.engine import Engine, EngineLimits
from handler.runner.errors import CannotServeError
from handler.runner.model import (
    PagedModel,
    context_length,
    load_config,
    load_model,
    pick_device,
    pick_dtype,
)
from handler.runner.protocol import ModelCard
from handler.runner.sequence import Sequence
from handler.runner.threads import num_threads
from handler.runner.tokenizer import TokenizerCard, load_tokenizer_card

logger = logging.getLogger(__name__)

# Defaults by kind of device: a CPU step over many prompt tokens would stall running streams, and
# a GPU step over few would leave it idle.
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
BATCH_SIZE = {"cpu": 64, "cuda": 256}

USEFUL_CONTEXT = {"cpu": 1024, "cuda": 8192}
"""Cache memory is planned for a full batch of contexts no longer than this (one longer context
always fits, too). More would keep more prefixes, but on the CPU it is memory others could use."""

WORKING_BYTES_PER_TOKEN = 64 * 1024
"""Rough need of one forward per token (activations, logits), kept free beside the pages."""


def build_engine(
    config: RunnerConfig, set_phase: Callable[[str], None]
) -> tuple[Engine, ModelCard]:
    """Load everything; `set_phase` is told what is going on. Raises CannotServeError."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    started = time.monotonic()
    device = pick_device(config.device)
    torch.set_num_threads(config.num_threads or num_threads(device.type))
    model_config = load_config(config.model_dir, config.trust_remote_code)
    set_phase("loading the tokenizer")
    tokenizer = load_tokenizer_card(config)
    dtype = pick_dtype(config.dtype, model_config, device)
    set_phase(f"loading the weights ({dtype_name(dtype)}, {device})")
    model = load_model(config.model_dir, model_config, dtype, device, config.trust_remote_code)
    paged = PagedModel(model)
    limits = _limits(config, paged, context_length(model_config))
    eos = _eos_token_ids(model, tokenizer)
    engine = Engine(paged, frozenset(eos), limits)
    set_phase("warming up")
    _warm_up(engine)
    card = _card(config, engine, tokenizer, eos)
    logger.info(
        "model ready in %.1f s: %s, %s on %s, attention %s, cache for %d tokens",
        *(time.monotonic() - started, card.model_id, card.dtype, card.device_name),
        *(card.attention, card.kv_capacity_tokens),
    )
    return engine, card


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` rather than `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _limits(config: RunnerConfig, paged: PagedModel, context: int) -> EngineLimits:
    """Bounds from the options, the model and the memory. Raises CannotServeError."""
    kind = paged.device.type
    if config.max_total_tokens and config.max_total_tokens > context:
        raise CannotServeError(
            f"--max-total-tokens {config.max_total_tokens} is more than the {context} positions "
            "this model can serve"
        )
    wanted = config.max_total_tokens or context
    batch_size = config.max_batch_size or BATCH_SIZE[kind]
    prefill = config.max_batch_prefill_tokens or PREFILL_TOKENS[kind]
    pages = memory.num_pages(
        paged.bytes_per_token * paged.page_size,
        paged.page_size,
        paged.device,
        fraction=config.kv_cache_memory_fraction,
        asked_bytes=config.kv_cache_memory_bytes,
        useful_tokens=max(wanted, batch_size * min(wanted, USEFUL_CONTEXT[kind])),
        reserved_bytes=(prefill + batch_size) * WORKING_BYTES_PER_TOKEN,
    )
    capacity = pages * paged.page_size
    if config.max_total_tokens and capacity < config.max_total_tokens:
        raise CannotServeError(
            f"--max-total-tokens {config.max_total_tokens} needs a cache of that many tokens, but "
            f"memory allows {capacity}"
        )
    total = min(wanted, capacity)
    if total < wanted:
        logger.warning("context limited to %d of %d tokens by the cache memory", total, wanted)
    longest_input = config.max_input_tokens or total - 1
    if longest_input >= total:
        raise CannotServeError(
            f"--max-input-tokens {longest_input} must be less than the total of {total} tokens"
        )
    return EngineLimits(total, longest_input, batch_size, prefill, pages)


def _eos_token_ids(model: PreTrainedModel, tokenizer: TokenizerCard) -> list[int]:
    """Every id that any of the model's files calls an end of sequence."""
    found: set[int] = set()
    sources: list[GenerationConfig | PretrainedConfig | None] = [
        model.generation_config,
        model.config,
        model.config.get_text_config(decoder=True),
    ]
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return sorted(found)


def _warm_up(engine: Engine) -> None:
    """One short generation, so that the first request does not pay for first calls."""
    prompt = [0] * min(8, engine.limits.max_input_tokens)
    engine.add(Sequence("warm-up", prompt, max_new_tokens=1, ignore_eos=True))
    while engine.has_work:
        engine.step()


def _card(
    config: RunnerConfig, engine: Engine, tokenizer: TokenizerCard, eos: list[int]
) -> ModelCard:
    model, limits = engine.model.model, engine.limits
    return ModelCard(
        model_id=config.model_id,
        revision=config.revision,
        model_type=model.config.model_type,
        tokenizer_path=tokenizer.tokenizer_path,
        special_tokens=tokenizer.special_tokens,
        special_token_ids=tokenizer.special_token_ids,
        eos_token_ids=eos,
        chat_templates=tokenizer.chat_templates,
        chat_template_source=tokenizer.chat_template_source,
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        dtype=dtype_name(model.dtype),
        device=str(model.device),
        device_name=_device_name(model.device),
        attention=engine.model.cache.name,
        kv_capacity_tokens=limits.num_pages * engine.model.page_size,
        max_batch_size=limits.max_batch_size,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
