"""Random OLMoE models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import OlmoeConfig, OlmoeForCausalLM

from octavo.kernels.ops import Ops

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "eos_token_id": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "as-they-are-weighed": {},
    "clipped": {"clip_qkv": 0.7, "attention_bias": True},
    "renormalised": {"norm_topk_prob": True, "tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(OlmoeForCausalLM, OlmoeConfig, **EXPERTS | VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = EXPERTS | VARIANTS["clipped"]
    check_family(tiny_of(OlmoeForCausalLM, OlmoeConfig, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(OlmoeForCausalLM, OlmoeConfig, **EXPERTS)
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="olmoe",
        is_permuted=False,
        expert_count=8,
        expert_used_count=3,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)
