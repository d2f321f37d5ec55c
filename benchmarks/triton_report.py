"""Writes the tables of docs/kernels.md: what the compiler and the plan say of the attention kernels.

    python benchmarks/triton_report.py

Nothing is measured: registers, shared memory and occupancy are read from kernels compiled for each
architecture, bytes are counted from the plans that real batches get.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent))

from triton_tiles import compile_tile

from octavo.kernels.triton_attention import shape_of, split_rule
from octavo.kernels.triton_attention_plan import plan_attention
from octavo.kernels.triton_gpu import ARCHITECTURES
from octavo.kernels.triton_table import DECODE, HEAD_PADS, PRECISIONS, PREFILL, tile_for

PAGE = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- benchmarks/triton_report.py writes from here -->", "<!-- to here -->"
ARCH, NUM_SMS = ARCHITECTURES["sm_90"], 132


@dataclass(frozen=True)
class Model:
    """One attention layer."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


MODELS = (
    Model("Llama 3 8B", 32, 8, 128),
    Model("Qwen 3 0.6B", 16, 8, 128),
    Model("SmolLM2 135M", 9, 3, 64),
)
BATCHES = {
    "1 decode at 1,000": [(1000, 1)],
    "1 decode at 32,000": [(32_000, 1)],
    "32 decodes at 1,000": [(1000, 1)] * 32,
    "256 decodes at 1,000": [(1000, 1)] * 256,
    "255 decodes at 100, one at 32,000": [(100, 1)] * 255 + [(32_000, 1)],
    "a prompt of 2,000": [(2000, 2000)],
    "a chunk of 512 at 8,000": [(8000, 512)],
}


def resources() -> str:
    """A line for every configuration, compiled with every option of attention."""
    lines = [
        "| GPU | Phase | KV | Heads up to | Tile | Warps | Stages | Registers | Shared memory | Programs an SM | Occupancy |\n",
        "|---|---|---|---|---|---|---|---|---|---|---|\n",
    ]
    for arch, phase, precision, pad in product(
        ARCHITECTURES.values(), (PREFILL, DECODE), PRECISIONS, HEAD_PADS
    ):
        tile = tile_for(arch, phase, pad, precision)
        one = compile_tile(arch, phase, precision, pad, tile, has_all=True)
        kinds = {"half": "16 bit", "fp8": "8 bit", "single": "32 bit"}
        cells = (
            arch.name,
            phase,
            kinds[precision],
            pad,
            f"{tile.block_m} x {tile.block_n}",
            tile.num_warps,
            tile.num_stages,
            one.num_registers,
            f"{one.shared_bytes / 1024:.1f} KiB",
            one.programs_per_sm,
            f"{one.occupancy:.0%}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    return "".join(lines)


def traffic() -> str:
    """Bytes a query token moves in one layer, against the fewest that any kernel could."""
    lines = [
        "| Model | Batch | Programs | Moved a token | Least | Ratio |\n",
        "|---|---|---|---|---|---|\n",
    ]
    for model, (name, rows) in product(MODELS, BATCHES.items()):
        programs, moved, least = count_bytes(model, rows)
        num_tokens = sum(count for _, count in rows)
        lines.append(
            f"| {model.name} | {name} | {programs:,} | {moved / num_tokens:,.0f} "
            f"| {least / num_tokens:,.0f} | {moved / least:.3f} |\n"
        )
    return "".join(lines)


def count_bytes(model: Model, rows: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Programs, bytes moved, fewest bytes: bfloat16 everywhere, one layer."""
    group = model.num_q_heads // model.num_kv_heads
    prefill, decode = (tile_for(ARCH, phase, model.head_dim, "half") for phase in (PREFILL, DECODE))
    plan = plan_attention(
        [count for _, count in rows],
        [seq_len for seq_len, _ in rows],
        prefill=shape_of(prefill, group),
        decode=shape_of(decode, group),
        split=split_rule(NUM_SMS, model.num_kv_heads),
        window=None,
        device=torch.device("cpu"),
    )
    tiles = torch.cat((plan.prefill_tiles, plan.decode_tiles)).long()
    key_bytes = 2 * model.num_kv_heads * model.head_dim * 2
    query_bytes = 2 * model.num_q_heads * model.head_dim * 2  # read and written
    partial_bytes = 2 * model.num_q_heads * (model.head_dim + 1) * 4
    num_tokens = sum(count for _, count in rows)
    split = tiles[:, 6] >= 0
    num_reread = int(tiles[split & (tiles[:, 7] == 0), 2].sum())  # queries that several parts read
    moved = int((tiles[:, 5] - tiles[:, 4]).sum()) * key_bytes
    moved += num_tokens * query_bytes + num_reread * query_bytes // 2
    moved += plan.num_partial_rows * partial_bytes
    moved += (len(tiles) * model.num_kv_heads + len(plan.merges) * model.num_q_heads) * 32
    moved += int((tiles[:, 5] - tiles[:, 4]).sum()) * model.num_kv_heads * 4 // 16  # block ids
    least = sum(seq_len for seq_len, _ in rows) * key_bytes + num_tokens * query_bytes
    return len(tiles) * model.num_kv_heads, moved, least


def main() -> None:
    """Rewrite what lies between the page's marks."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    made = (
        f"{BEGIN}\n\n### What the compiler says\n\nTriton {triton.__version__}, with window, soft cap and "
        f"sinks. No configuration spills.\n\n{resources()}\n### Bytes\n\n{ARCH.name} with {NUM_SMS} "
        "multiprocessors, bfloat16, blocks of 16, one layer, bytes a query token.\n\n"
        f"{traffic()}\n{END}"
    )
    PAGE.write_text(head + made + tail)


if __name__ == "__main__":
    main()
