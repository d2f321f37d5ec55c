"""Weights with NaN or infinity in them are refused when they are read, by file and tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.gguf_file import BLOCK_LAYOUTS, GGUFFile
from octavo.engine.errors import CheckpointError
from octavo.engine.models.dequantize import QUANTIZED_TYPES, dequantize
from octavo.engine.models.finite import SCALES, are_scales_finite, is_finite
from octavo.engine.models.loader import load_model
from octavo.kernels.select import select_ops

CPU = torch.device("cpu")
BAD = [math.nan, math.inf, -math.inf]


def load(path: Path, model_impl: str = "auto", keep_quantized: bool = False) -> Any:
    return load_model(
        open_checkpoint(path, model_impl),
        select_ops("torch", CPU),
        dtype=torch.float32,
        device=CPU,
        keep_quantized=keep_quantized,
    )


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("model_impl", ["octavo", "transformers"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_folder(
    make_tiny: Callable[..., Any],
    save: Callable[..., Path],
    bad: float,
    model_impl: str,
    name: str,
) -> None:
    folder = save(make_tiny())
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[5] = bad
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        load(folder, model_impl)
    assert str(error.value) == f"{path}: the tensor {name} holds NaN or infinity."


@pytest.mark.parametrize("keep_quantized", [False, True])
@pytest.mark.parametrize("name", ["output_norm.weight", "token_embd.weight", "blk.1.ffn_up.weight"])
def test_a_gguf_file(
    tmp_path: Path,
    make_tiny: Callable[..., Any],
    write_gguf: Callable[..., None],
    name: str,
    keep_quantized: bool,
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_tiny(), path, "Q4_1", eos_token_id=2)
    load(path, keep_quantized=keep_quantized)
    tensor = GGUFFile.open(path).tensors[name]
    data = bytearray(path.read_bytes())
    nan = np.array([math.nan], "<f4" if tensor.type == "F32" else "<f2").tobytes()
    data[tensor.offset : tensor.offset + len(nan)] = nan
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        load(path, keep_quantized=keep_quantized)
    assert str(error.value) == f"{path}: the tensor {name} holds NaN or infinity."


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers(dtype: torch.dtype, bad: float) -> None:
    values = torch.randn(7, 1001).to(dtype)
    assert is_finite(values)
    assert is_finite(torch.full((300, 300), torch.finfo(dtype).max, dtype=dtype))  # its sum is not
    assert is_finite(torch.zeros(0, dtype=dtype))
    for index in (0, 3000, 7006):
        poisoned = values.clone()
        poisoned.view(-1)[index] = bad
        assert not is_finite(poisoned)
    both = values.clone()
    both[0, 0], both[6, 9] = bad, -bad
    assert not is_finite(both)


@pytest.mark.parametrize("type", sorted(QUANTIZED_TYPES))
def test_blocks_are_finite_where_their_numbers_are(type: str) -> None:
    """Over bytes of any kind, of which one scale in 32 is no number."""
    random = torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(300):
        shape = (3, BLOCK_LAYOUTS[type][1])
        data = torch.randint(256, shape, generator=random, dtype=torch.uint8).view(-1)
        numbers = dequantize(data, type, torch.float32)
        assert are_scales_finite(data, type) == bool(numbers.isfinite().all())
        seen.add(are_scales_finite(data, type))
    assert seen == {True, False}
    assert are_scales_finite(torch.zeros(0, dtype=torch.uint8), type)


def test_every_type_of_blocks_has_its_scales() -> None:
    assert SCALES.keys() == QUANTIZED_TYPES
