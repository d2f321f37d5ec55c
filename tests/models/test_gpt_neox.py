"""Random GPT-NeoX models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from octavo.kernels.ops import Ops

VARIANTS: dict[str, dict[str, Any]] = {
    "parallel": {"use_parallel_residual": True},
    "one-after-the-other": {"use_parallel_residual": False},
    "whole-rotary": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    "half-rotary": {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "no-attention-bias": {"attention_bias": False},
    "tied": {"tie_word_embeddings": True},
    "tanh": {"hidden_act": "gelu_fast", "layer_norm_eps": 1e-3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    check_family(tiny_of(GPTNeoXForCausalLM, GPTNeoXConfig, **VARIANTS[variant])).logits(ops)


@pytest.mark.native
@pytest.mark.parametrize("variant", ["parallel", "one-after-the-other"])
def test_greedy_tokens(
    variant: str, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(GPTNeoXForCausalLM, GPTNeoXConfig, **VARIANTS[variant])
    check_family(theirs).greedy("cpu")
