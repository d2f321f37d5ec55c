"""Random Gemma models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from octavo.kernels.ops import Ops

GEMMA2, GEMMA3 = (Gemma2ForCausalLM, Gemma2Config), (Gemma3ForCausalLM, Gemma3TextConfig)
SHAPE: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 6}
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma2": (GEMMA2, {}),
    "gemma2-tight-caps": (
        GEMMA2,
        {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 5,
        },
    ),
    "gemma2-no-caps": (
        GEMMA2,
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 24},
    ),
    "gemma2-biases": (GEMMA2, {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma2-layers": (
        GEMMA2,
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 13},
    ),
    "gemma3": (GEMMA3, {"num_hidden_layers": 7}),
    "gemma3-one-kv-head": (GEMMA3, {"num_key_value_heads": 1, "sliding_window_pattern": 2}),
    "gemma3-rope": (GEMMA3, {"rope_parameters": LINEAR, "sliding_window_pattern": 2}),
    "gemma3-capped": (GEMMA3, {"final_logit_softcapping": 20.0, "sliding_window": 21}),
    "gemma3-biases": (GEMMA3, {"attention_bias": True, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    classes, changes = VARIANTS[variant]
    check_family(tiny_of(*classes, **(SHAPE | changes))).logits(ops)


@pytest.mark.native
@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_greedy_tokens(
    variant: str, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    classes, changes = VARIANTS[variant]
    check_family(tiny_of(*classes, **(SHAPE | changes))).greedy("cpu")
