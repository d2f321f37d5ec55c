"""Random Mixtral, Qwen3-MoE and OLMoE models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from octavo.kernels.ops import Ops

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5}),
    "qwen3": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24},
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 3, "eos_token_id": 2, "num_key_value_heads": 4},
    ),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 6, "num_experts_per_tok": 3}),
    "mixtral-one-expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-renormalised": ("qwen3", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3-every-other-layer": ("qwen3", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen3-dense-layers": ("qwen3", {"mlp_only_layers": [0, 2], "num_hidden_layers": 3}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 6}),
    "olmoe": ("olmoe", {}),
    "olmoe-clipped": ("olmoe", {"clip_qkv": 0.7, "attention_bias": True}),
    "olmoe-renormalised": ("olmoe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
}


@pytest.fixture
def tiny(tiny_of: Callable[..., Any]) -> Callable[[str], Any]:
    """``tiny(variant)``: transformers' model."""

    def make(variant: str) -> Any:
        family, changes = VARIANTS[variant]
        model_class, config_class, common = FAMILIES[family]
        return tiny_of(model_class, config_class, **common | changes)

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny: Callable[[str], Any], check_family: Callable[..., Any]
) -> None:
    check_family(tiny(variant)).logits(ops)


@pytest.mark.native
@pytest.mark.parametrize("variant", ["mixtral", "qwen3-dense-layers", "olmoe-clipped"])
def test_greedy_tokens(
    variant: str, tiny: Callable[[str], Any], check_family: Callable[..., Any]
) -> None:
    check_family(tiny(variant)).greedy("cpu")
