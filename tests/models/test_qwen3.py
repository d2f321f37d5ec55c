"""Random Qwen3 models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from octavo.kernels.ops import Ops

WINDOWED = {"use_sliding_window": True, "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "head-dim-of-its-own": {"head_dim": 24},
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "upper-layers-windowed": WINDOWED | {"num_hidden_layers": 3, "max_window_layers": 1},
    "layer-types": WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]},
    "a-window-that-is-not-used": {"sliding_window": 6, "max_window_layers": 0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(Qwen3ForCausalLM, Qwen3Config, **{"head_dim": 16} | VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = VARIANTS["upper-layers-windowed"] | {"head_dim": 16}
    check_family(tiny_of(Qwen3ForCausalLM, Qwen3Config, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(Qwen3ForCausalLM, Qwen3Config, head_dim=24)
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="qwen3",
        is_permuted=False,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)
