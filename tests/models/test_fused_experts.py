"""Folders that hold each layer's experts in two tensors: the same model as from any other folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.tensors import check_tensors, tensor_shapes
from octavo.engine.errors import CheckpointError
from octavo.engine.models.loader import open_weights
from octavo.kernels.ops import Ops

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 24, "mlp_only_layers": [0], "num_hidden_layers": 3},
    "Olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture
def make(tiny_of: Callable[..., Any], save: Callable[..., Path]) -> Callable[[str], Any]:
    def made(name: str) -> Any:
        model_class = getattr(transformers, f"{name}ForCausalLM")
        theirs = tiny_of(model_class, model_class.config_class, **FAMILIES[name])
        return theirs, save(theirs, save_original_format=False)

    return made


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(
    name: str, ops: Ops, make: Callable[[str], Any], check_family: Callable[..., Any]
) -> None:
    theirs, folder = make(name)
    assert GATE_UP in load_file(folder / "model.safetensors")
    check_family(theirs, path=folder).logits(ops)


def refused(folder: Path, pattern: str) -> None:
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=pattern):
        check_tensors(checkpoint, tensor_shapes(checkpoint))


def test_what_does_not_fit_is_refused(make: Callable[[str], Any]) -> None:
    _, folder = make("Mixtral")
    one = "model.layers.1.block_sparse_moe.experts.3.w1.weight"

    def add_one(tensors: dict[str, Any]) -> None:
        tensors[one] = tensors[GATE_UP][3, :96].clone()

    def cut(tensors: dict[str, Any]) -> None:
        tensors.pop(one)
        tensors[GATE_UP] = torch.cat([tensors[GATE_UP], tensors[GATE_UP][:, :1]], 1)

    def drop(tensors: dict[str, Any]) -> None:
        del tensors[GATE_UP]

    for change, pattern in (
        (add_one, rf"holds the tensor {one} twice"),
        (cut, "has shape"),
        (drop, r"lacks the tensors model\.layers\.1\.block_sparse_moe\.experts\.0\.w1\.weight"),
    ):
        edit(folder, change)
        refused(folder, pattern)


def test_one_expert_with_numbers_that_are_none(make: Callable[[str], Any]) -> None:
    _, folder = make("Mixtral")

    def poison(tensors: dict[str, Any]) -> None:
        tensors[GATE_UP][3, 0, 0] = math.nan

    edit(folder, poison)
    source = open_weights(open_checkpoint(folder))
    module = "model.layers.1.mlp.experts"
    for sound in ("2.gate_proj", "3.up_proj", "3.down_proj"):
        source.load(f"{module}.{sound}.weight", torch.float32)
    with pytest.raises(CheckpointError, match=f"the tensor {GATE_UP} holds NaN"):
        source.load(f"{module}.3.gate_proj.weight", torch.float32)
