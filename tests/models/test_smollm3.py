"""Random SmolLM3 models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from octavo.kernels.ops import Ops

WINDOWED = {"use_sliding_window": True, "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "every-second-layer": {"no_rope_layer_interval": 2},
    "every-fourth-layer": {"num_hidden_layers": 5},
    "a-list-of-layers": {"no_rope_layers": [0, 1], "tie_word_embeddings": False},
    "windows-where-nothing-rotates": WINDOWED | {"no_rope_layers": [1, 0]},
    "windows-by-layer-types": WINDOWED
    | {"no_rope_layers": [1, 0], "layer_types": ["sliding_attention", "full_attention"]},
    "biases": {"attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(SmolLM3ForCausalLM, SmolLM3Config, **VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = VARIANTS["windows-where-nothing-rotates"]
    check_family(tiny_of(SmolLM3ForCausalLM, SmolLM3Config, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(SmolLM3ForCausalLM, SmolLM3Config, num_hidden_layers=5)
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="smollm3",
        is_permuted=True,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)


@pytest.mark.parametrize(
    "keys",
    [
        {"no_rope_layer_interval": 3},
        {"use_sliding_window": True, "sliding_window": 6},
        {"use_sliding_window": True},
        {"num_key_value_heads": None},
    ],
)
def test_layers_are_what_absent_keys_make_of_them(
    keys: dict[str, Any], assert_read_alike: Callable[..., None]
) -> None:
    assert_read_alike(SmolLM3ForCausalLM, **keys)
