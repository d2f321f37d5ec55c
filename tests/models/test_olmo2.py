"""Random OLMo 2 models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Olmo2Config, Olmo2ForCausalLM

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.errors import CheckpointError
from octavo.kernels.ops import Ops

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 1},
    "head-dim-of-its-own": {"head_dim": 24},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny_of(Olmo2ForCausalLM, Olmo2Config, **VARIANTS[variant])
    check_family(theirs).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    changes = VARIANTS["grouped-query"]
    check_family(tiny_of(Olmo2ForCausalLM, Olmo2Config, **changes)).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(Olmo2ForCausalLM, Olmo2Config)
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="olmo2",
        is_permuted=False,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)


def test_a_gguf_file_with_windows_is_no_olmo2(
    tmp_path: Path, tiny_of: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    path, theirs = tmp_path / "model.gguf", tiny_of(Olmo2ForCausalLM, Olmo2Config)
    write_gguf(theirs, path, arch="olmo2", is_permuted=False, sliding_window=6)
    with pytest.raises(CheckpointError, match="sliding windows are not supported for olmo2"):
        open_checkpoint(path)
