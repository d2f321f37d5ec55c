"""Random Granite models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GraniteConfig, GraniteForCausalLM

from octavo.kernels.ops import Ops

SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "multipliers": SCALES,
    "no-multipliers": {},
    "biases": SCALES | {"attention_bias": True, "mlp_bias": True},
    "tied": SCALES | {"tie_word_embeddings": True, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(GraniteForCausalLM, GraniteConfig, **VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = SCALES
    check_family(tiny_of(GraniteForCausalLM, GraniteConfig, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(GraniteForCausalLM, GraniteConfig, **SCALES)
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="granite",
        is_permuted=True,
        embedding_scale=12.0,
        residual_scale=0.22,
        attention_scale=0.3,
        logit_scale=8.0,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)
