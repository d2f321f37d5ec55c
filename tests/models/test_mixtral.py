"""Random Mixtral models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from octavo.kernels.ops import Ops

EXPERTS = {"num_local_experts": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "two-experts": {},
    "windowed": {"sliding_window": 6, "num_experts_per_tok": 3},
    "the-only-expert": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "tied": {"tie_word_embeddings": True, "head_dim": 24},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(MixtralForCausalLM, MixtralConfig, **EXPERTS | VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = EXPERTS | VARIANTS["windowed"]
    check_family(tiny_of(MixtralForCausalLM, MixtralConfig, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(MixtralForCausalLM, MixtralConfig, **EXPERTS)
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        expert_count=5,
        expert_used_count=2,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)
