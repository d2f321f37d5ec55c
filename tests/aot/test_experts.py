"""The experts' kernels, compiled as real models launch them, with every tile: nothing spills, everything fits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import triton_experts
from octavo.kernels.triton_aot import CompiledLaunch, compile_launches
from octavo.kernels.triton_experts_table import FEW, MANY, PRECISIONS, Tile, crowd_of
from octavo.kernels.triton_experts_tiles import TILES
from octavo.kernels.triton_gpu import ARCHITECTURES

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHAPES = {  # experts, chosen, hidden, mlp
    "Mixtral 8x7B": (8, 2, 4096, 14336),
    "Qwen3 30B-A3B": (128, 8, 2048, 768),
    "odd": (5, 3, 100, 72),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiles() -> Any:
    """``benchmarks/triton_experts_tiles.py``, which is no part of the package."""
    path = BENCHMARKS / "triton_experts_tiles.py"
    spec = importlib.util.spec_from_file_location("triton_experts_tiles", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(compiled: CompiledLaunch) -> None:
    arch = compiled.arch
    assert compiled.num_spilled == 0
    assert compiled.num_registers <= arch.max_registers
    assert compiled.shared_bytes <= arch.shared_bytes
    assert compiled.programs_per_sm >= 1


def test_the_table_is_whole() -> None:
    keys = {
        (arch, crowd, precision)
        for arch in ARCHITECTURES
        for crowd in (FEW, MANY)
        for precision in PRECISIONS
    }
    assert set(TILES) == keys


@pytest.mark.parametrize("key", TILES, ids=lambda key: "-".join(key))
def test_every_tile(tiles: Any, key: tuple[str, str, str]) -> None:
    """For the shape that it was chosen by: both products of an expert, with that tile."""
    name, *rest = key
    tile = Tile(*TILES[key])
    compiled = tiles.compile_tile(ARCHITECTURES[name], *rest, tile)
    assert [one.constants["IS_GATED"] for one in compiled] == [True, False]
    for one in compiled:
        check(one)
        assert one.num_warps == tile.num_warps
        assert one.constants["BLOCK_M"] == tile.block_m


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("crowd", [FEW, MANY])
def test_other_shapes(tiles: Any, arch: str, crowd: str, shape: tuple[int, int, int, int]) -> None:
    tile = Tile(*TILES[arch, crowd, "half"])
    for one in tiles.compile_tile(ARCHITECTURES[arch], crowd, "half", tile, shape=shape):
        check(one)


def _meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_routing_and_combining(arch: str) -> None:
    def call() -> None:
        for num_experts, top_k, hidden, _ in SHAPES.values():
            triton_experts.route(_meta(7, num_experts), top_k, renormalise=True)
            triton_experts.route(_meta(7, num_experts), top_k, renormalise=False)
            rows, weights = (_meta(7 * top_k, hidden), _meta(7, top_k, dtype=torch.float32))
            triton_experts.combine(rows.float(), weights, torch.bfloat16)

    launches = compile_launches(ARCHITECTURES[arch], call)
    assert len(launches) == 3 * len(SHAPES)
    for one in launches:
        check(one)


def test_a_grid_has_room_for_the_worst_case() -> None:
    """However the rows spread, each expert's last block may be partly filled."""
    assert triton_experts.max_blocks(8, 64, 16) == 8
    assert triton_experts.max_blocks(8192, 64, 128) == 64 + (8192 - 64) // 128


def test_crowds() -> None:
    assert crowd_of(8, 64) == crowd_of(16 * 64, 64) == FEW
    assert crowd_of(16 * 64 + 8, 64) == MANY
