"""Chooses the attention kernel's tiles by what the compiler says of them; writes ``kernels/triton_tiles.py``.

    python benchmarks/triton_tiles.py [--arch sm_90 ...]

For every architecture, phase, precision and head dimension the first candidate is taken that, with every
option of attention and with none, spills no register, has some to spare for other shapes, fits into shared
memory and leaves room for enough programs on an SM. Candidates stand in the order in which reasoning prefers them:

- prefill is bound by the matrix units: tall tiles reuse K and V for more rows, and eight warps on an SM let
  one's softmax overlap another's products.
- decode is bound by memory: what matters is how many bytes of K and V are on their way. Tiles have the 16
  rows that the matrix units take at least, and an SM has two programs, so that one streams while another
  begins or ends.

Looking up the block table comes before K and V, and the compiler gives each of the two half of the stages
but one: 3 stages fetch one step ahead, 5 stages two. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import torch

from octavo.kernels import triton_attention
from octavo.kernels.ops import AttentionMetadata, KVScales, LayerKVCache
from octavo.kernels.triton_aot import CompiledLaunch, compile_launches
from octavo.kernels.triton_gpu import ARCHITECTURES, Architecture, Gpu
from octavo.kernels.triton_table import DECODE, HEAD_PADS, PRECISIONS, PREFILL, Tile
from octavo.kernels.triton_tiles import TILES

TARGET = Path(__file__).resolve().parents[1] / "kernels" / "triton_tiles.py"

PREFILL_TILES = (
    Tile(128, 64, 8, 5),
    Tile(128, 64, 8, 3),
    Tile(128, 32, 8, 3),
    Tile(64, 64, 4, 5),
    Tile(64, 64, 4, 3),
    Tile(64, 32, 4, 5),
    Tile(64, 32, 4, 3),
    Tile(64, 32, 8, 3),
    Tile(32, 32, 4, 3),
    Tile(32, 32, 8, 2),
    Tile(16, 32, 4, 2),
)
SINGLE_TILES = (  # products without matrix units: operands and sums are all in registers
    Tile(32, 32, 4, 3),
    Tile(32, 32, 8, 3),
    Tile(16, 32, 4, 3),
    Tile(16, 32, 4, 2),
    Tile(16, 16, 4, 3),
    Tile(16, 16, 4, 2),
)
DECODE_TILES = (
    Tile(16, 64, 4, 5),
    Tile(16, 32, 4, 5),
    Tile(16, 64, 4, 3),
    Tile(16, 32, 4, 3),
    Tile(16, 16, 4, 5),
    Tile(16, 16, 4, 3),
    Tile(16, 16, 4, 2),
)
MIN_RESIDENT = {PREFILL: ((1, 8), (1, 4)), DECODE: ((2, 8), (1, 4))}
"""Programs and warps that an SM shall hold; what it must."""
SPARE_REGISTERS = 16
"""Other head counts, strides and block sizes need a few more than the shape that is compiled here."""
TYPES = {
    "half": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
    "single": (torch.float32, torch.float32),
}
NUM_Q_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 16
HEADER = '''"""Written by ``benchmarks/triton_tiles.py``, which says how each was chosen.

(architecture, phase, precision, padded head dimension) → rows, keys in a step, warps, stages.
"""

TILES = {
'''


def compile_tile(
    arch: Architecture, phase: str, precision: str, head_dim: int, tile: Tile, *, has_all: bool
) -> CompiledLaunch:
    """The attention kernel with this tile, as its launcher launches it.

    Args:
        has_all: with a window, a soft cap, sinks; or with none of them.
    """
    q_type, cache_type = TYPES[precision]
    num_tokens, seq_len = (1, 1000) if phase == DECODE else (130, 1000)
    q = torch.empty(num_tokens, NUM_Q_HEADS, head_dim, dtype=q_type, device="meta")
    blocks = torch.empty(100, BLOCK_SIZE, NUM_KV_HEADS, head_dim, dtype=cache_type, device="meta")
    table = torch.empty(1, 63, dtype=torch.int32, device="meta")
    metadata = AttentionMetadata(
        *(table[0, :2], table[0, :1], table, table[0]),
        *([num_tokens], [seq_len], num_tokens, seq_len),
    )
    attention = triton_attention.TritonAttention(Gpu(arch, 100), tiles={phase: tile})
    scales = KVScales(1.0, 1.0) if precision == "fp8" else None
    sinks = torch.empty(NUM_Q_HEADS, dtype=q_type, device="meta")

    def launch() -> None:
        cache = LayerKVCache(blocks, blocks)
        if has_all:
            attention(
                q,
                cache,
                metadata,
                scale=0.1,
                window=4096,
                soft_cap=30.0,
                sinks=sinks,
                kv_scales=scales,
            )
        else:
            attention(q, cache, metadata, scale=0.1, kv_scales=scales)

    launches = compile_launches(arch, launch)
    return next(one for one in launches if one.kernel == "attention_kernel")


def candidates(phase: str, precision: str) -> tuple[Tile, ...]:
    """Tiles in the order of preference."""
    if phase == DECODE:
        return DECODE_TILES
    return SINGLE_TILES if precision == "single" else PREFILL_TILES


def is_good(compiled: CompiledLaunch, min_programs: int, min_warps: int) -> bool:
    """Whether a tile may be used."""
    return (
        compiled.num_spilled == 0
        and compiled.num_registers <= compiled.arch.max_registers - SPARE_REGISTERS
        and compiled.shared_bytes <= compiled.arch.shared_bytes
        and compiled.programs_per_sm >= min_programs
        and compiled.programs_per_sm * compiled.num_warps >= min_warps
    )


def choose(arch: Architecture, phase: str, precision: str, head_pad: int) -> Tile:
    """The first candidate that is good, else the first that is good enough."""
    compiled = {}

    def get(tile: Tile, has_all: bool) -> CompiledLaunch:
        key = (tile, has_all)
        if key not in compiled:
            compiled[key] = compile_tile(arch, phase, precision, head_pad, tile, has_all=has_all)
        return compiled[key]

    for min_programs, min_warps in MIN_RESIDENT[phase]:
        for tile in candidates(phase, precision):
            if all(is_good(get(tile, one), min_programs, min_warps) for one in (True, False)):
                return tile
    raise SystemExit(f"no tile fits {arch.name} {phase} {precision} {head_pad}")


def main() -> None:
    """Choose for some architectures, keep the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", choices=ARCHITECTURES, nargs="*", default=list(ARCHITECTURES))
    chosen = dict(TILES)
    for key in product(parser.parse_args().arch, (PREFILL, DECODE), PRECISIONS, HEAD_PADS):
        chosen[key] = tuple(choose(ARCHITECTURES[key[0]], *key[1:]))
        print(*key, chosen[key], flush=True)
        save(chosen)


def save(chosen: dict[tuple[str, str, str, int], tuple[int, ...]]) -> None:
    """Write the table, in order."""
    order = product(ARCHITECTURES, (PREFILL, DECODE), PRECISIONS, HEAD_PADS)
    lines = [f"    {json.dumps(key)}: {chosen[key]},\n" for key in order if key in chosen]
    lines = [line.replace("[", "(").replace("]", ")") for line in lines]
    TARGET.write_text(HEADER + "".join(lines) + "}\n")


if __name__ == "__main__":
    main()
