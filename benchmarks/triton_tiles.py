"""Chooses the attention kernel's tiles by what the compiler says of them; writes ``kernels/triton_tiles.py``.

    python benchmarks/triton_tiles.py [--check]

For every architecture, phase, precision and head dimension the first candidate is taken that, with every
option of attention and with none, spills no register, fits into shared memory and leaves room for enough
programs on an SM. Candidates stand in the order in which reasoning prefers them:

- prefill is bound by the matrix units: tall tiles reuse K and V for more rows. Two programs on an SM overlap
  one's softmax with the other's products; failing that, eight warps do.
- decode is bound by memory: what matters is how many bytes of K and V are on their way. Tiles have the 16
  rows that the matrix units take at least; ``num_stages - 2`` further steps are in flight (one stage looks
  up the block table). Two programs on an SM, so that one streams while another begins or ends.

Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

from octavo.kernels import triton_attention
from octavo.kernels.ops import AttentionMetadata, KVScales, LayerKVCache
from octavo.kernels.triton_aot import CompiledLaunch, compile_launches
from octavo.kernels.triton_gpu import ARCHITECTURES, Architecture, Gpu
from octavo.kernels.triton_table import DECODE, HEAD_PADS, PRECISIONS, PREFILL, Tile

TARGET = Path(__file__).resolve().parents[1] / "kernels" / "triton_tiles.py"

CANDIDATES = {
    PREFILL: [
        Tile(128, 64, 8, 4),
        Tile(128, 64, 8, 3),
        Tile(64, 64, 4, 4),
        Tile(64, 64, 4, 3),
        Tile(64, 32, 4, 4),
        Tile(64, 32, 4, 3),
        Tile(64, 32, 8, 3),
        Tile(32, 32, 4, 3),
        Tile(32, 32, 8, 2),
        Tile(16, 32, 4, 2),
        Tile(16, 16, 4, 2),
    ],
    DECODE: [
        Tile(16, 64, 4, 5),
        Tile(16, 64, 4, 4),
        Tile(16, 64, 4, 3),
        Tile(16, 32, 4, 4),
        Tile(16, 32, 4, 3),
        Tile(16, 32, 4, 2),
        Tile(16, 16, 4, 3),
        Tile(16, 16, 4, 2),
    ],
}
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
                *(q, cache, metadata),
                **dict(scale=0.1, window=4096, soft_cap=30.0, sinks=sinks, kv_scales=scales),
            )
        else:
            attention(q, cache, metadata, scale=0.1, kv_scales=scales)

    launches = compile_launches(arch, launch)
    return next(one for one in launches if one.kernel == "attention_kernel")


def is_good(compiled: CompiledLaunch, min_programs: int, min_warps: int) -> bool:
    """Whether a tile may be used."""
    return (
        compiled.num_spilled == 0
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

    for min_programs, min_warps in ((2, 8), (1, 8), (1, 4)):
        for tile in CANDIDATES[phase]:
            if all(is_good(get(tile, one), min_programs, min_warps) for one in (True, False)):
                return tile
    raise SystemExit(f"no tile fits {arch.name} {phase} {precision} {head_pad}")


def main() -> None:
    """Choose all, and write or compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", choices=ARCHITECTURES, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    lines = []
    for name, phase, precision, pad in product(
        options.arch, (PREFILL, DECODE), PRECISIONS, HEAD_PADS
    ):
        tile = choose(ARCHITECTURES[name], phase, precision, pad)
        lines.append(f'    ("{name}", "{phase}", "{precision}", {pad}): {tuple(tile)},\n')
        print(lines[-1], end="", flush=True)
    text = HEADER + "".join(lines) + "}\n"
    if options.check:
        sys.exit(text != TARGET.read_text())
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
