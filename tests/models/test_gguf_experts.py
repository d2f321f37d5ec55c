"""Experts in GGUF files: blocks are multiplied as they are, and what is not computed is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.tensors import matrices
from octavo.engine.errors import CheckpointError
from octavo.engine.models.loader import load_model
from octavo.kernels.cpu_linear import WeightKind
from octavo.kernels.ops import Ops
from octavo.kernels.select import select_ops

CPU = torch.device("cpu")
TOKENS = torch.randint(3, 200, (45,), generator=torch.Generator().manual_seed(3)).tolist()
SIZES: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 16,
}
METADATA: dict[str, Any] = {
    "arch": "qwen3moe",
    "is_permuted": False,
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}


@pytest.mark.parametrize("type", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_logits_of_every_tensor_type(
    type: str,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    load: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
    ops: Ops,
) -> None:
    theirs = tiny_of(Qwen3MoeForCausalLM, Qwen3MoeConfig, **SIZES)
    write_gguf(theirs, tmp_path / "model.gguf", type, **METADATA)
    ours = load(tmp_path / "model.gguf", ops)
    assert_close(feed(ours, ops, TOKENS, [7]), transformers_logits(theirs, TOKENS))


def experts_of_layer_1(path: Path, ops: Ops, keep_quantized: bool) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    model: Any = load_model(open_checkpoint(path), ops, keep_quantized=keep_quantized, **options)
    return model.layers[1].mlp


@pytest.mark.native
@pytest.mark.parametrize(
    ("type", "kind"),
    [
        ("Q8_0", WeightKind.Q8_0),
        ("Q4_0", WeightKind.Q4_0),
        ("Q4_1", WeightKind.Q4_1),
        ("Q5_0", WeightKind.Q8_0),
        ("Q5_1", WeightKind.Q8_F32),
    ],
)
def test_blocks_are_multiplied_as_they_are(
    type: str,
    kind: WeightKind,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
) -> None:
    """The router is float32 in either case; what differs is the rounding of experts' activations."""
    theirs, ops = tiny_of(Qwen3MoeForCausalLM, Qwen3MoeConfig, **SIZES), select_ops("cpu", CPU)
    write_gguf(theirs, tmp_path / "model.gguf", type, **METADATA)
    as_numbers, as_blocks = (
        experts_of_layer_1(tmp_path / "model.gguf", ops, keep_quantized)
        for keep_quantized in (False, True)
    )
    assert as_numbers.packed.gate_up.kind == WeightKind.FLOAT32
    assert as_blocks.packed.gate_up.kind == as_blocks.packed.down.kind == kind
    x = torch.randn(45, 64, generator=torch.Generator().manual_seed(1))
    expected = as_numbers(x)
    assert 0 < (as_blocks(x) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID},
            "expert_gating_func must be 1, the softmax, got 2",
        ),
        ({"expert_weights_scale": 2.5}, r"expert_weights_scale must be 1, got 2\.5"),
        ({"expert_shared_count": 1}, "expert_shared_count must be 0, got 1"),
        ({"expert_used_count": 6}, "6 of 5 experts"),
        ({"expert_count": 4}, r"holds the tensors blk\.0\.ffn_down_exps\[4\]\.weight"),
        ({"expert_count": 6}, r"lacks the tensors blk\.0\.ffn_gate_exps\[5\]\.weight"),
    ],
)
def test_what_is_not_computed_is_refused(
    metadata: dict[str, Any],
    message: str,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    load: Callable[..., Any],
) -> None:
    theirs = tiny_of(Qwen3MoeForCausalLM, Qwen3MoeConfig, **SIZES)
    write_gguf(theirs, tmp_path / "model.gguf", **METADATA | metadata)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model.gguf", select_ops("reference", CPU))


def test_a_tensor_of_matrices_is_named_by_them() -> None:
    """One of senseless size stays whole, to be refused by its name."""
    parts = {"a[0].weight": (3, 4), "a[1].weight": (3, 4)}
    assert dict(matrices("a.weight", (2, 3, 4))) == parts
    for shape in [(3, 4), (1 << 40, 0, 4), (2, 2, 2, 2)]:
        assert dict(matrices("a.weight", shape)) == {"a.weight": shape}
