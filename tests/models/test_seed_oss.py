"""Random Seed-OSS models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import SeedOssConfig, SeedOssForCausalLM

from octavo.kernels.ops import Ops

VARIANTS: dict[str, dict[str, Any]] = {
    "biases-of-q-k-v": {"head_dim": 24},
    "bias-of-the-output": {"head_dim": 16, "attention_out_bias": True},
    "no-attention-bias": {"head_dim": 16, "attention_bias": False},
    "mlp-bias": {"head_dim": 16, "mlp_bias": True},
    "tied": {"head_dim": 16, "tie_word_embeddings": True},
    "multi-head": {"head_dim": None, "num_key_value_heads": None},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(SeedOssForCausalLM, SeedOssConfig, **VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = VARIANTS["biases-of-q-k-v"]
    check_family(tiny_of(SeedOssForCausalLM, SeedOssConfig, **changes)).greedy("cpu")
