"""Random Qwen2 models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from octavo.kernels.ops import Ops

WINDOWED = {"use_sliding_window": True, "sliding_window": 6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "tied": {"tie_word_embeddings": True},
    "upper-layers-windowed": WINDOWED | {"num_hidden_layers": 3, "max_window_layers": 1},
    "all-layers-windowed": WINDOWED | {"max_window_layers": 0},
    "layer-types": WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]},
    "a-window-that-is-not-used": {"sliding_window": 6, "max_window_layers": 0},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 10000.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(Qwen2ForCausalLM, Qwen2Config, **VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = VARIANTS["upper-layers-windowed"]
    check_family(tiny_of(Qwen2ForCausalLM, Qwen2Config, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(Qwen2ForCausalLM, Qwen2Config)
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="qwen2",
        is_permuted=False,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)


@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
        {"sliding_window": 6, "max_window_layers": 2},
    ],
)
def test_layers_are_what_absent_keys_make_of_them(
    keys: dict[str, Any], assert_read_alike: Callable[..., None]
) -> None:
    assert_read_alike(Qwen2ForCausalLM, **keys)
