"""Loads the model through transformers with our attention, and runs it on a step's chunks.

Must not know: which sequences run (it is handed chunks), sampling, sockets.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from handler.runner import attention, attention_varlen, packed_linear
from handler.runner.attention import STEP_KEYWORD, LayerShape, PagedCache, step_positions
from handler.runner.attention_gather import GatherCache
from handler.runner.errors import CannotServeError
from handler.runner.probe import attention_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from handler.runner.sequence import Chunk

logger = logging.getLogger(__name__)

GATHER_PAGE_SIZE = 16

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU. Raises CannotServeError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotServeError(
            f"device {name!r} was asked for, but torch sees no GPU here; use 'cpu'"
        )
    return device


def pick_dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """`auto` is the type the weights were saved in, as far as the device computes in it."""
    if name != "auto":
        return DTYPES[name]
    saved: Any = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
    if isinstance(saved, str):
        saved = DTYPES.get(saved, torch.float32)
    if device.type == "cpu" and saved != torch.float32:
        # Without native bfloat16 every product would be converted back and forth, and float16
        # products have no fast path on the CPU at all.
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return cast("torch.dtype", saved)


def load_config(model_dir: str, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration of a model this server can run. Raises CannotServeError otherwise."""
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        model_class = _model_class(config, model_dir, trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CannotServeError(
            f"the configuration in {model_dir} cannot be read: {error}"
        ) from error
    check_supported(config, model_class)
    return config  # type: ignore[no-any-return]


def check_supported(config: PretrainedConfig, model_class: type[PreTrainedModel] | None) -> None:
    """Refuse what could only give wrong text. `model_class` None: unknown to transformers."""
    remedy = (
        "Supported are decoder-only text models of transformers whose attention goes through its "
        "AttentionInterface (Llama, Mistral, Qwen, Gemma, Phi, Granite, OLMo, SmolLM, Cohere, "
        "GPT-2, GPT-NeoX, OPT, Mixtral, gpt-oss and others)."
    )
    if model_class is None:
        raise CannotServeError(
            f"model type {config.model_type!r} is not a text-generation model known to this "
            f"transformers version. {remedy}"
        )
    if config.is_encoder_decoder:
        raise CannotServeError(f"model type {config.model_type!r} has an encoder. {remedy}")
    stateful = getattr(model_class, "_is_stateful", False)
    if stateful or not getattr(model_class, "_supports_attention_backend", False):
        raise CannotServeError(
            f"the attention of model type {config.model_type!r} ({model_class.__name__}) cannot be "
            f"replaced by the paged one this server needs. {remedy}"
        )


def _model_class(config: PretrainedConfig, model_dir: str, trust: bool) -> Any:
    """The class AutoModelForCausalLM would pick, without making one."""
    remote = getattr(config, "auto_map", None) or {}
    if trust and "AutoModelForCausalLM" in remote:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote["AutoModelForCausalLM"], model_dir)
    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found[0] if isinstance(found, (list, tuple)) else found


def load_model(
    model_dir: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model on its device, ready for inference. Raises CannotServeError."""
    attention.register()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # each file format raises its own kinds
        reason = f"{type(error).__name__}: {error}"
        raise CannotServeError(f"the weights in {model_dir} cannot be loaded: {reason}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise CannotServeError(
            f"the weights in {model_dir} lack {len(missing)} of the model's tensors (the first is "
            f"{missing[0]}), which would be left at random; is the copy complete, and does "
            "config.json belong to these weights?"
        )
    torch.nn.Module.to(model, device)
    return cast("PreTrainedModel", model.train(False))


def context_length(config: PretrainedConfig) -> int:
    """Positions the model was made for, as far as one forward may mix rows of any length."""
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if longest is None:
        raise CannotServeError(f"the configuration of {text.model_type!r} names no context length")
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if kind in ("dynamic", "longrope"):
        # These switch every row of a forward to other frequencies once one row is longer than
        # the original context; short rows would then get wrong text.
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(text, "original_max_position_embeddings", None)
        if original and original < longest:
            logger.warning("context limited to %d tokens (%s rotary scaling)", original, kind)
            longest = original
    return int(longest)


class PagedModel:
    """A loaded model with its cache: `forward` turns chunks into logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        self.layers: list[LayerShape] = attention_layers(model)
        self._cache: PagedCache | None = None
        self.varlen = attention_varlen.usable(self.layers, self.dtype, self.device)
        self.page_size = attention_varlen.PAGE_SIZE if self.varlen else GATHER_PAGE_SIZE
        # Only the rows that are sampled need logits; nearly every model can be told so.
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        if packed_linear.usable(self.dtype, self.device):
            packed_linear.pack(model)

    @property
    def bytes_per_token(self) -> int:
        """Cache memory that one token takes over all layers."""
        size = self.dtype.itemsize
        return size * sum(layer.values_per_token for layer in self.layers)

    @property
    def cache(self) -> PagedCache:
        """The pages; `allocate` comes first."""
        if self._cache is None:
            raise RuntimeError("allocate() has not been called")
        return self._cache

    def allocate(self, num_pages: int) -> None:
        """Make the pages' tensors."""
        dtype, device = self.dtype, self.device
        if self.varlen:
            self._cache = attention_varlen.VarlenCache(self.layers, num_pages, dtype, device)
        else:
            self._cache = GatherCache(self.layers, num_pages, self.page_size, dtype, device)

    @torch.inference_mode()
    def forward(self, chunks: list[Chunk], rows: Iterable[int]) -> torch.Tensor:
        """Run the chunks, laid end to end; logits (len(rows), vocabulary) of these token rows."""
        tokens = [t for c in chunks for t in c.sequence.tokens[c.start : c.end]]
        wanted = torch.tensor(list(rows), dtype=torch.int64, device=self.device)
        keep: dict[str, Any] = {"logits_to_keep": wanted} if self._takes_rows else {}
        output = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([step_positions(chunks)], device=self.device),
            use_cache=False,
            **keep,
            **{STEP_KEYWORD: self.cache.begin(chunks)},
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._takes_rows else logits[wanted]
