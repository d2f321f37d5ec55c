"""Every tile of the attention kernel compiles for its architecture, spills nothing and fits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.kernels.ops import AttentionMetadata, LayerKVCache
from octavo.kernels.triton_aot import CompiledLaunch, compile_launches
from octavo.kernels.triton_attention import TritonAttention, merge_parts
from octavo.kernels.triton_gpu import ARCHITECTURES, Gpu
from octavo.kernels.triton_table import (
    DECODE,
    HEAD_PADS,
    PRECISIONS,
    PREFILL,
    Tile,
    head_pad_for,
    tile_for,
)
from octavo.kernels.triton_tiles import TILES

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiles() -> Any:
    """``benchmarks/triton_tiles.py``, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("triton_tiles", BENCHMARKS / "triton_tiles.py")
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
        (arch, phase, precision, pad)
        for arch in ARCHITECTURES
        for phase in (PREFILL, DECODE)
        for precision in PRECISIONS
        for pad in HEAD_PADS
    }
    assert set(TILES) == keys


@pytest.mark.parametrize("key", TILES, ids=lambda key: "-".join(map(str, key)))
def test_every_tile_with_every_option(tiles: Any, key: tuple[str, str, str, int]) -> None:
    """Window, soft cap and sinks at once: what takes most registers."""
    name, *rest = key
    compiled = tiles.compile_tile(ARCHITECTURES[name], *rest, Tile(*TILES[key]), has_all=True)
    check(compiled)
    tile = Tile(*TILES[key])
    assert compiled.num_warps == tile.num_warps
    assert compiled.constants["BLOCK_M"] == tile.block_m
    assert compiled.constants["BLOCK_N"] == tile.block_n


PLAIN = [key for key in TILES if key[0] in ("sm_80", "sm_90") or key[1:3] == (DECODE, "half")]


@pytest.mark.parametrize("key", PLAIN, ids=lambda key: "-".join(map(str, key)))
def test_tiles_without_options(tiles: Any, key: tuple[str, str, str, int]) -> None:
    name, *rest = key
    check(tiles.compile_tile(ARCHITECTURES[name], *rest, Tile(*TILES[key]), has_all=False))


def launch(
    arch: str,
    heads: tuple[int, int],
    head_dim: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    is_fused: bool = False,
    table_width: int = 65,
    **options: Any,
) -> list[CompiledLaunch]:
    """A step with a prefill row and a split decode row, as the op set launches it."""
    num_q_heads, num_kv_heads = heads
    num_heads = num_q_heads + 2 * num_kv_heads if is_fused else num_q_heads
    q = torch.empty(130, num_heads, head_dim, dtype=dtype, device="meta")[:, :num_q_heads]
    shape = (100, block_size, num_kv_heads, head_dim)
    cache = LayerKVCache(*(torch.empty(shape, dtype=dtype, device="meta") for _ in range(2)))
    table = torch.empty(2, table_width, dtype=torch.int32, device="meta")
    metadata = AttentionMetadata(
        query_start_loc=table[0, :3],
        seq_lens=table[0, :2],
        block_tables=table,
        slot_mapping=table[0],
        query_lens_host=[1, 129],
        seq_lens_host=[1030, 200],
        max_query_len=129,
        max_seq_len=1030,
    )
    attention = TritonAttention(Gpu(ARCHITECTURES[arch], 132))
    return compile_launches(
        ARCHITECTURES[arch], lambda: attention(q, cache, metadata, scale=0.1, **options)
    )


CASES = {
    "Llama 3 8B": {"heads": (32, 8), "head_dim": 128, "is_fused": True},
    "Qwen 3 0.6B with a window": {"heads": (16, 8), "head_dim": 128, "window": 1000},
    "SmolLM2 135M": {"heads": (9, 3), "head_dim": 64, "is_fused": True},
    "heads of 80": {"heads": (32, 32), "head_dim": 80, "block_size": 32},
    "heads of 96": {"heads": (24, 8), "head_dim": 96, "block_size": 48},
    "heads of 72, odd strides": {
        "heads": (5, 1),
        "head_dim": 72,
        "block_size": 256,
        "is_fused": True,
    },
    "float16, many heads": {"heads": (71, 1), "head_dim": 64, "dtype": torch.float16},
    "a table of one block": {"heads": (8, 8), "head_dim": 256, "table_width": 1},
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_real_launches(arch: str, case: dict[str, Any]) -> None:
    prefill, decode, merge = launch(arch, **case)
    assert [one.kernel for one in (prefill, decode, merge)] == [
        "attention_kernel",
        "attention_kernel",
        "merge_kernel",
    ]
    for compiled in (prefill, decode, merge):
        check(compiled)
    num_q_heads, num_kv_heads = case["heads"]
    assert not prefill.constants["IS_SPLIT"]
    assert decode.constants["IS_SPLIT"]
    assert merge.grid == (num_q_heads,)
    assert decode.grid[0] == 3 * num_kv_heads * -(-num_q_heads // num_kv_heads // 16) or (
        case.get("window") and decode.grid[0] == 2 * num_kv_heads
    )


def test_a_window_of_one_token_is_a_launch_of_its_own() -> None:
    """An argument that equals 1 is compiled in."""
    kernels = launch("sm_90", (16, 8), 128, window=1)
    assert [one.kernel for one in kernels] == ["attention_kernel", "attention_kernel"]
    for compiled in kernels:
        check(compiled)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_merging(arch: str, head_dim: int) -> None:
    out = torch.empty(3, 32, head_dim, dtype=torch.bfloat16, device="meta")
    partial = torch.empty(40, 32, head_dim, device="meta")
    merges = torch.empty(3, 8, dtype=torch.int32, device="meta")
    (compiled,) = compile_launches(
        ARCHITECTURES[arch], lambda: merge_parts(merges, out, partial, partial[:, :, 0])
    )
    assert compiled.grid == (3 * 32,)
    check(compiled)


@pytest.mark.parametrize("width", [64, 65, 1])
def test_the_width_of_the_table_compiles_nothing_anew(width: int) -> None:
    """It changes from step to step; a kernel for each would be a stall for each."""
    from octavo.kernels.triton_attention_tile import attention_kernel

    launch("sm_90", (32, 8), 128)
    before = len(attention_kernel.device_caches["90"][0])
    launch("sm_90", (32, 8), 128, table_width=width)
    assert len(attention_kernel.device_caches["90"][0]) == before


def test_heads_find_their_column() -> None:
    arch = ARCHITECTURES["sm_90"]
    for head_dim, pad in ((8, 64), (64, 64), (80, 128), (96, 128), (128, 128), (256, 256)):
        assert tile_for(arch, DECODE, head_dim, "half") == Tile(
            *TILES["sm_90", DECODE, "half", pad]
        )
    assert [head_pad_for(n) for n in (8, 16, 80, 96, 128, 256)] == [16, 16, 128, 128, 128, 256]
