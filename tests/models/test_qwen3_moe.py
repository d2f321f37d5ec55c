"""Random Qwen3-MoE models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from octavo.kernels.ops import Ops

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "head_dim": 24,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as-they-are-weighed": {},
    "renormalised": {"norm_topk_prob": True, "attention_bias": True},
    "every-other-layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "dense-layers": {"mlp_only_layers": [0, 2], "num_hidden_layers": 3},
    "windowed": {"use_sliding_window": True, "sliding_window": 6},
    "a-window-that-is-not-used": {"sliding_window": 6},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(Qwen3MoeForCausalLM, Qwen3MoeConfig, **EXPERTS | VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = EXPERTS | VARIANTS["dense-layers"]
    check_family(tiny_of(Qwen3MoeForCausalLM, Qwen3MoeConfig, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(Qwen3MoeForCausalLM, Qwen3MoeConfig, **EXPERTS, norm_topk_prob=True)
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="qwen3moe",
        is_permuted=False,
        expert_count=8,
        expert_used_count=3,
        expert_feed_forward_length=40,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)
