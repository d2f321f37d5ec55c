"""Safetensors whose tensors are of several types, in one file or in shards, with and without a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.errors import CheckpointError
from octavo.engine.models.loader import load_model
from octavo.kernels.ops import Ops
from octavo.kernels.reference import ReferenceOps

TOKENS = torch.randint(0, 96, (21,), generator=torch.Generator().manual_seed(5)).tolist()
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Tensors = dict[str, torch.Tensor]


def mixed(weights: Tensors) -> Tensors:
    """Each tensor in a type of its own, in turn."""
    return {name: t.to(TYPES[i % 4]) for i, (name, t) in enumerate(sorted(weights.items()))}


def write_single(folder: Path, weights: Tensors) -> None:
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_shards(folder: Path, weights: Tensors) -> None:
    """Three files, with every third tensor in each."""
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(weight_map.values()):
        held = {name: weights[name] for name in weights if weight_map[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


WRITERS = {"single": write_single, "sharded": write_shards}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in config.items() if v is not None}))


@pytest.fixture
def folder(make_tiny: Callable[..., Any], save: Callable[..., Path]) -> Path:
    return save(make_tiny())


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mix_loads_as_if_all_were_of_the_chosen_type(
    write: str, dtype: torch.dtype, folder: Path, ops: Ops, feed: Callable[..., Any]
) -> None:
    weights = mixed(load_file(folder / "model.safetensors"))
    assert {t.dtype for t in weights.values()} == set(TYPES)
    write_single(folder, {name: t.to(dtype) for name, t in weights.items()})

    def logits() -> torch.Tensor:
        checkpoint = open_checkpoint(folder)
        model = load_model(checkpoint, ops, dtype=dtype, device=torch.device("cpu"))
        found: torch.Tensor = feed(model, ops, TOKENS, [len(TOKENS)])
        return found

    expected = logits()
    WRITERS[write](folder, weights)
    assert torch.equal(logits(), expected)


def test_a_mix_computes_transformers_logits(
    folder: Path,
    load: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
) -> None:
    from transformers import AutoModelForCausalLM

    write_single(folder, mixed(load_file(folder / "model.safetensors")))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ops = ReferenceOps()
    ours = feed(load(folder, ops), ops, TOKENS, [len(TOKENS)])
    assert_close(ours, transformers_logits(theirs, TOKENS))


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({EMBEDDING: torch.float32}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_where_the_config_names_no_type_the_weights_do(
    folder: Path, types: dict[str, torch.dtype], expected: str
) -> None:
    weights = load_file(folder / "model.safetensors")
    write_single(folder, {n: t.to(types.get(n, torch.bfloat16)) for n, t in weights.items()})
    assert open_checkpoint(folder).spec.dtype == "float32"  # as the config says
    edit_config(folder, dtype=None, torch_dtype=None)
    assert open_checkpoint(folder).spec.dtype == expected
    write_shards(folder, {n: t.to(torch.float16) for n, t in weights.items()})
    assert open_checkpoint(folder).spec.dtype == "float16"


def test_types_that_are_no_numbers_to_compute_with_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    write_single(folder, {**weights, "model.norm.weight": torch.ones(64, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight has type I32"):
        load_model(
            open_checkpoint(folder),
            ReferenceOps(),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize("write", WRITERS)
def test_heads_tied_missing_and_of_another_type(
    write: str, folder: Path, load: Callable[..., Any]
) -> None:
    ops, weights = ReferenceOps(), load_file(folder / "model.safetensors")
    weights[EMBEDDING] = weights[EMBEDDING].bfloat16()
    own = weights.pop(HEAD).half()
    hidden = torch.randn(3, weights[EMBEDDING].shape[1])

    def rewrite(tensors: Tensors, *, is_tied: bool) -> None:
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        write_single(folder, tensors)
        WRITERS[write](folder, tensors)
        edit_config(folder, tie_word_embeddings=is_tied)

    rewrite({**weights, HEAD: own}, is_tied=False)
    torch.testing.assert_close(load(folder, ops).logits(hidden), hidden @ own.float().T)
    expected = hidden @ weights[EMBEDDING].float().T
    for extra in ({}, {HEAD: weights[EMBEDDING].float()}):  # the same numbers, in a wider type
        rewrite({**weights, **extra}, is_tied=True)
        torch.testing.assert_close(load(folder, ops).logits(hidden), expected)
    rewrite(weights, is_tied=False)
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head\.weight"):
        load(folder, ops)
    rewrite({**weights, HEAD: own}, is_tied=True)
    with pytest.raises(
        CheckpointError, match=r"ties lm_head\.weight .* yet holds one that differs"
    ):
        load(folder, ops)
