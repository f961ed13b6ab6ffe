"""Tiny random-weight models of many architectures, made by transformers from small configurations.

Weights are larger than transformers' own initialisation so that greedy continuations vary, and
windows are short so that a few dozen tokens reach beyond them.
"""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from handler.runner import attention

VOCABULARY = 97
WINDOW = 8
POSITIONS = 256

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,  # every continuation runs to its length
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _config(kind: type[PretrainedConfig], **own: object) -> Callable[[], PretrainedConfig]:
    return lambda: kind(**{**_COMMON, **own})


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _config(LlamaConfig),
    "qwen2": _config(Qwen2Config),
    "qwen2-window": _config(
        Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": _config(Qwen3Config, head_dim=16),
    "mistral": _config(MistralConfig, sliding_window=WINDOW),
    "gemma2": _config(
        Gemma2Config,
        head_dim=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": _config(Gemma3TextConfig, head_dim=16, sliding_window=WINDOW, layer_types=_MIXED),
    "phi3": _config(Phi3Config, sliding_window=None),
    "granite": _config(GraniteConfig, attention_multiplier=0.2, residual_multiplier=0.7),
    "olmo2": _config(Olmo2Config),
    "smollm3": _config(SmolLM3Config, no_rope_layers=[1, 0, 1, 0]),
    "starcoder2": _config(Starcoder2Config, sliding_window=WINDOW),
    "cohere": _config(CohereConfig, logit_scale=0.5),
    "gpt2": _config(GPT2Config, n_embd=32, n_layer=4, n_head=4, n_positions=POSITIONS),
    "opt": _config(OPTConfig, ffn_dim=48, word_embed_proj_dim=32),
    "gpt_neox": _config(GPTNeoXConfig, num_key_value_heads=None),
    "mixtral": _config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _config(Qwen3MoeConfig, head_dim=16, num_experts=4, **_EXPERTS),
    "gpt_oss": _config(
        GptOssConfig,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_MIXED,
    ),
}


def make_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1 or "sinks" in name:
                weights.normal_(0.0, 0.35, generator=generator)
    return model


def make_paged_llama() -> PreTrainedModel:
    """The tiny Llama with our attention in place of its own."""
    attention.register()
    model = make_model(FAMILIES["llama"]())
    model.set_attn_implementation(attention.NAME)
    return model


def make_prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]
