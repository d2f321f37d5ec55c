"""Chooses the experts' tiles by what the compiler says of them; writes ``kernels/triton_experts_tiles.py``.

    python benchmarks/triton_experts_tiles.py [--arch sm_90 ...]

For every architecture, crowd and precision the first candidate is taken that, for both products of an expert,
spills no register, has some to spare for other shapes, fits into shared memory and leaves room for enough
programs on an SM. Candidates stand in the order in which reasoning prefers them:

- where an expert has many rows, the matrix units bound it: tall tiles reuse the weights for more rows. Gate
  and up are two products of one tile of rows, so that 64 columns are 128 of weights.
- where it has few, memory does: the weights are read once whatever the tile is, so it has the 16 rows that
  the matrix units take at least, and what matters is how many bytes of weights are on their way.

Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import torch

from octavo.kernels.triton_aot import CompiledLaunch, compile_launches
from octavo.kernels.triton_experts import TritonExperts, TritonMixture
from octavo.kernels.triton_experts_table import FEW, MANY, PRECISIONS, Tile
from octavo.kernels.triton_experts_tiles import TILES
from octavo.kernels.triton_gpu import ARCHITECTURES, Architecture, Gpu

TARGET = Path(__file__).resolve().parents[1] / "kernels" / "triton_experts_tiles.py"

CANDIDATES = {
    (MANY, "half"): (
        Tile(128, 64, 64, 8, 4),
        Tile(128, 64, 64, 8, 3),
        Tile(128, 64, 32, 8, 4),
        Tile(128, 64, 32, 8, 3),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 64, 32, 4, 3),
        Tile(64, 64, 32, 4, 2),
        Tile(64, 32, 32, 4, 2),
    ),
    (FEW, "half"): (
        Tile(16, 64, 128, 4, 4),
        Tile(16, 64, 128, 4, 3),
        Tile(16, 64, 64, 4, 4),
        Tile(16, 64, 64, 4, 3),
        Tile(16, 32, 64, 4, 3),
        Tile(16, 32, 64, 4, 2),
        Tile(16, 32, 32, 2, 2),
    ),
    # Products without matrix units: operands and sums are all in registers.
    (MANY, "single"): (
        Tile(64, 32, 32, 8, 3),
        Tile(32, 32, 32, 8, 3),
        Tile(32, 32, 32, 4, 3),
        Tile(32, 32, 32, 4, 2),
        Tile(32, 32, 16, 4, 2),
    ),
    (FEW, "single"): (
        Tile(16, 32, 64, 4, 3),
        Tile(16, 32, 32, 4, 3),
        Tile(16, 32, 32, 4, 2),
        Tile(16, 16, 32, 4, 2),
        Tile(16, 16, 16, 4, 2),
    ),
}
MIN_RESIDENT = {MANY: ((1, 8), (1, 4)), FEW: ((2, 8), (1, 4))}
"""Programs and warps that an SM shall hold; what it must."""
SPARE_REGISTERS = 16
"""Other sizes need a few more than the shape that is compiled here."""
NUM_EXPERTS, TOP_K, HIDDEN, MLP = 64, 8, 2048, 1024
NUM_TOKENS = {FEW: 4, MANY: 1024}
TYPES = {"half": torch.bfloat16, "single": torch.float32}
HEADER = '''"""Written by ``benchmarks/triton_experts_tiles.py``, which says how each was chosen.

(architecture, crowd, precision) → rows, columns, numbers in a step, warps, stages.
"""

TILES = {
'''


def compile_tile(
    arch: Architecture,
    crowd: str,
    precision: str,
    tile: Tile,
    *,
    shape: tuple[int, int, int, int] = (NUM_EXPERTS, TOP_K, HIDDEN, MLP),
) -> list[CompiledLaunch]:
    """Both products with this tile, as the launcher launches them, for experts of a ``shape``."""
    num_experts, top_k, hidden, mlp = shape
    dtype, num_tokens = TYPES[precision], NUM_TOKENS[crowd]

    def meta(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    experts = TritonExperts(meta(num_experts, 2 * mlp, hidden), meta(num_experts, hidden, mlp))
    mixture = TritonMixture(Gpu(arch, 100), tiles={FEW: tile, MANY: tile})
    launches = compile_launches(
        arch,
        lambda: mixture(
            meta(num_tokens, hidden), meta(num_tokens, num_experts), experts, top_k, True
        ),
    )
    return [one for one in launches if one.kernel == "experts_kernel"]


def is_good(compiled: CompiledLaunch, min_programs: int, min_warps: int) -> bool:
    """Whether a tile may be used."""
    return (
        compiled.num_spilled == 0
        and compiled.num_registers <= compiled.arch.max_registers - SPARE_REGISTERS
        and compiled.shared_bytes <= compiled.arch.shared_bytes
        and compiled.programs_per_sm >= min_programs
        and compiled.programs_per_sm * compiled.num_warps >= min_warps
    )


def choose(arch: Architecture, crowd: str, precision: str) -> Tile:
    """The first candidate that is good, else the first that is good enough."""
    compiled = {
        tile: compile_tile(arch, crowd, precision, tile) for tile in CANDIDATES[crowd, precision]
    }
    for least in MIN_RESIDENT[crowd]:
        for tile, launches in compiled.items():
            if all(is_good(one, *least) for one in launches):
                return tile
    raise SystemExit(f"no tile fits {arch.name} {crowd} {precision}")


def main() -> None:
    """Choose for some architectures, keep the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", choices=ARCHITECTURES, nargs="*", default=list(ARCHITECTURES))
    chosen = dict(TILES)
    for key in product(parser.parse_args().arch, (FEW, MANY), PRECISIONS):
        chosen[key] = tuple(choose(ARCHITECTURES[key[0]], *key[1:]))
        print(*key, chosen[key], flush=True)
        save(chosen)


def save(chosen: dict[tuple[str, str, str], tuple[int, ...]]) -> None:
    """Write the table, in order."""
    order = product(ARCHITECTURES, (FEW, MANY), PRECISIONS)
    lines = [f"    {json.dumps(key)}: {chosen[key]},\n" for key in order if key in chosen]
    lines = [line.replace("[", "(").replace("]", ")") for line in lines]
    TARGET.write_text(HEADER + "".join(lines) + "}\n")


if __name__ == "__main__":
    main()
