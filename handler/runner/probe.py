"""Learns what a loaded model's attention needs, by running one token through it.

The model itself is asked rather than its configuration: each architecture names things its own
way. What the calls show is then held against the configuration where a disagreement would mean
wrong text, and such a model is refused.

Must not know: pages, scheduling.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from handler.runner.attention import STEP_KEYWORD, AttentionCall, LayerShape, PagedStep
from handler.runner.errors import CannotServeError

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


class _RecordingStep(PagedStep):
    """Remembers each layer's call. One token sees itself alone, so its output is its value."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.shapes:
            raise CannotServeError(
                f"layer {call.layer} runs attention twice, which is not supported"
            )
        self.shapes[call.layer] = LayerShape(
            num_kv_heads=call.key.shape[0],
            key_dim=call.key.shape[-1],
            value_dim=call.value.shape[-1],
            window=call.window,
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
        )
        group = call.query.shape[0] // call.value.shape[0]
        return call.value.repeat_interleave(group, dim=0).transpose(0, 1)


@torch.inference_mode()
def attention_layers(model: PreTrainedModel) -> list[LayerShape]:
    """One entry per layer, in order. Raises CannotServeError for what would give wrong text."""
    step = _RecordingStep()
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, **{STEP_KEYWORD: step})
    config = model.config.get_text_config(decoder=True)
    layers = [step.shapes[index] for index in sorted(step.shapes)]
    _check_all_layers(config, step.shapes)
    _check_windows(config, layers)
    return layers


def _check_all_layers(config: PretrainedConfig, shapes: dict[int, LayerShape]) -> None:
    expected = set(range(config.num_hidden_layers))
    if set(shapes) != expected:
        raise CannotServeError(
            f"model type {config.model_type!r} has {len(expected)} layers, of which "
            f"{len(set(shapes) & expected)} use the attention this server can page; the others "
            "keep a state of another kind, so it cannot be served"
        )


def _check_windows(config: PretrainedConfig, layers: list[LayerShape]) -> None:
    """The windows the calls carried must be those the configuration asks for."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return
    unknown = set(kinds) - _KNOWN_LAYER_TYPES
    if unknown:
        raise CannotServeError(
            f"model type {config.model_type!r} has layers of type {sorted(unknown)}; supported "
            f"are {sorted(_KNOWN_LAYER_TYPES)}"
        )
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        window = config.sliding_window if kind == "sliding_attention" else None
        if layer.window != window:
            raise CannotServeError(
                f"layer {index} of model type {config.model_type!r} should see {window or 'all'} "
                f"tokens but its attention asks for {layer.window or 'all'}"
            )
