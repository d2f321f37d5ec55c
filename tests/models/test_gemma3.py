"""Random Gemma 3 text models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.errors import CheckpointError
from octavo.kernels.ops import Ops
from octavo.kernels.reference import ReferenceOps

TOKENS = torch.randint(3, 264, (41,), generator=torch.Generator().manual_seed(5)).tolist()
SHAPE: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
}
ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as-published": {"num_hidden_layers": 7, "sliding_window_pattern": 6},
    "one-kv-head": {"num_key_value_heads": 1},
    "scaled-rope": {"rope_parameters": ROPE},
    "capped": {"final_logit_softcapping": 20.0, "query_pre_attn_scalar": 5},
    "biases-and-a-head": {"attention_bias": True, "tie_word_embeddings": False},
    "layers-of-its-own": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 13,
    },
    "no-window": {"layer_types": ["full_attention"] * 4, "head_dim": 24},
}


def make(tiny_of: Callable[..., Any], **changes: Any) -> Any:
    return tiny_of(Gemma3ForCausalLM, Gemma3TextConfig, **(SHAPE | changes))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    check_family(make(tiny_of, **VARIANTS[variant])).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    check_family(make(tiny_of)).greedy("cpu")


@pytest.mark.parametrize("factor", [None, 8.0])
def test_logits_of_a_gguf_file(
    factor: float | None,
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    """Norms are stored with 1 added; windows are where llama.cpp has them; only layers without one are scaled."""
    rope = {
        "full_attention": ROPE["full_attention"] if factor else {"rope_type": "default"},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    theirs = make(tiny_of, num_hidden_layers=7, sliding_window_pattern=6, rope_parameters=rope)
    scaling: dict[str, Any] = {}
    if factor:
        scaling = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": factor}
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="gemma3",
        is_permuted=False,
        convert=lambda name, values: values + 1 if "norm" in name else values,
        sliding_window=theirs.config.sliding_window,
        **scaling,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)


def edit(folder: Path, *without: str, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: values[key] for key in values if key not in without}))


def test_spellings_of_transformers_4_mean_the_same(
    tiny_of: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Tensor],
) -> None:
    folder, ops = save(make(tiny_of, rope_parameters=ROPE)), ReferenceOps()
    expected = feed(load(folder, ops), ops, TOKENS, [41])
    edit(
        folder,
        "rope_parameters",
        "layer_types",
        "tie_word_embeddings",
        rope_theta=1000000.0,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
    )
    assert torch.equal(feed(load(folder, ops), ops, TOKENS, [41]), expected)


@pytest.mark.parametrize(
    "rope",
    [
        ROPE | {"full_attention": ROPE["full_attention"] | {"factor": 2.0}},
        ROPE | {"sliding_attention": ROPE["full_attention"]},
        ROPE | {"full_attention": ROPE["sliding_attention"]},
    ],
    ids=["factor", "local", "global"],
)
def test_both_ways_to_rotate_count(
    rope: dict[str, Any],
    tiny_of: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Tensor],
) -> None:
    """Guards the comparisons above."""
    folder, ops = save(make(tiny_of, rope_parameters=ROPE)), ReferenceOps()
    before = feed(load(folder, ops), ops, TOKENS, [41])
    edit(folder, rope_parameters=rope)
    after = feed(load(folder, ops), ops, TOKENS, [41])
    assert (after - before).abs().max() > 1e-3 * before.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters must be an object"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "architecture Gemma3ForConditionalGeneration is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    changes: dict[str, Any], message: str, tiny_of: Callable[..., Any], save: Callable[..., Path]
) -> None:
    folder = save(make(tiny_of))
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)
