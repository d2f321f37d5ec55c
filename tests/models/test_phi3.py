"""Random Phi-3 models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from octavo.kernels.ops import Ops

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.2],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "windowed": {"sliding_window": 6},
    "partial-rotary": {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(Phi3ForCausalLM, Phi3Config, **VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = VARIANTS["windowed"]
    check_family(tiny_of(Phi3ForCausalLM, Phi3Config, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(Phi3ForCausalLM, Phi3Config, sliding_window=6, **VARIANTS["partial-rotary"])
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="phi3",
        is_permuted=False,
        sliding_window=6,
        rope_dimension_count=12,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)
