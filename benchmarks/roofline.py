"""The fewest bytes and operations that a model's kernels and steps can do with, and the time that takes a card.

    python benchmarks/roofline.py > docs/roofline.md        (make docs writes it too)

Every input is read once and every output written once, in bfloat16; nothing is counted that a cache could keep
from being read again. Standard library only: ``gpu_check.py`` holds measurements against the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from model_shapes import SHAPES, Shape

WIDTH = 2  # bytes of a bfloat16
SHOWN = ("Llama-3-8B", "Qwen3-0.6B", "SmolLM2-135M")
BATCHES = (1, 32, 256)
CONTEXT = 1024
PROMPT = 2048
LAUNCHES_PER_LAYER = 10
"""Four products, two norms, rotary and store, attention and its second reduction, the gate."""


class Card(NamedTuple):
    """A GPU, by its maker's datasheet."""

    bytes_per_s: float
    flops_per_s: float  # bfloat16, dense


CARDS = {
    "A100 80 GB SXM": Card(2.039e12, 312e12),
    "H100 80 GB SXM": Card(3.35e12, 989e12),
    "H200 141 GB SXM": Card(4.8e12, 989e12),
}


class Work(NamedTuple):
    """What has to be moved and computed."""

    num_bytes: float
    flops: float

    def plus(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def times(self, count: float) -> Work:
        return Work(self.num_bytes * count, self.flops * count)

    def floor_s(self, card: Card) -> float:
        """No implementation on the card is faster."""
        return max(self.num_bytes / card.bytes_per_s, self.flops / card.flops_per_s)

    def bound(self, card: Card) -> str:
        is_memory = self.num_bytes / card.bytes_per_s >= self.flops / card.flops_per_s
        return "memory" if is_memory else "compute"


def total(works: Sequence[Work]) -> Work:
    return Work(sum(w.num_bytes for w in works), sum(w.flops for w in works))


def product(num_tokens: int, num_in: int, num_out: int, out_width: int = WIDTH) -> Work:
    """A linear layer: its weight, what goes in, what comes out."""
    moved = WIDTH * (num_in * num_out + num_tokens * num_in) + out_width * num_tokens * num_out
    return Work(moved, 2.0 * num_tokens * num_in * num_out)


def add_rms_norm(shape: Shape, num_tokens: int) -> Work:
    """Two rows read, two written, and the weight."""
    size = shape.hidden_size
    return Work(WIDTH * (4 * num_tokens * size + size), 6.0 * num_tokens * size)


def rotary_store(shape: Shape, num_tokens: int) -> Work:
    """q, k and v read and written; a row of angles in float32, a slot and a position a token."""
    numbers = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    moved = num_tokens * (2 * WIDTH * numbers + 4 * shape.head_dim + 16)
    return Work(moved, 3.0 * num_tokens * numbers)


def silu_and_mul(shape: Shape, num_tokens: int) -> Work:
    """Two halves read, one written."""
    size = num_tokens * shape.intermediate_size
    return Work(3 * WIDTH * size, 5.0 * size)


def attention(shape: Shape, rows: Sequence[tuple[int, int]]) -> Work:
    """Rows of (sequence length, query tokens): keys and values once a sequence, queries in, result out."""
    num_kv = sum(seq_len for seq_len, _ in rows) * shape.num_kv_heads * shape.head_dim
    num_q = sum(count for _, count in rows) * shape.num_q_heads * shape.head_dim
    seen = sum(count * seq_len - count * (count - 1) / 2 for seq_len, count in rows)
    flops = 4.0 * seen * shape.num_q_heads * shape.head_dim
    return Work(WIDTH * (2 * num_kv + 2 * num_q), flops)


def copy_block(shape: Shape, block_size: int = 16) -> Work:
    """One block of all layers, read and written."""
    numbers = 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_dim
    return Work(2 * WIDTH * numbers, 0.0)


def layer_kernels(shape: Shape, rows: Sequence[tuple[int, int]]) -> dict[str, Work]:
    """Of one layer, by name."""
    num_tokens = sum(count for _, count in rows)
    hidden, heads = shape.hidden_size, shape.num_q_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    mlp = shape.intermediate_size
    return {
        "qkv product": product(num_tokens, hidden, heads + 2 * kv),
        "rotary and store": rotary_store(shape, num_tokens),
        "attention": attention(shape, rows),
        "output product": product(num_tokens, heads, hidden),
        "norm with residual, twice": add_rms_norm(shape, num_tokens).times(2),
        "gate and up product": product(num_tokens, hidden, 2 * mlp),
        "silu and multiply": silu_and_mul(shape, num_tokens),
        "down product": product(num_tokens, mlp, hidden),
    }


def step(shape: Shape, rows: Sequence[tuple[int, int]]) -> Work:
    """A step of rows of (sequence length, query tokens), each of which samples."""
    num_tokens = sum(count for _, count in rows)
    embedding = Work(2.0 * WIDTH * num_tokens * shape.hidden_size, 0.0)
    layers = total(list(layer_kernels(shape, rows).values())).times(shape.num_layers)
    logits = product(len(rows), shape.hidden_size, shape.vocab_size, out_width=4)
    return total((embedding, layers, logits))


def aimed_share(name: str, is_prefill: bool) -> float:
    """Of the floor's speed, what the design should reach: an aim, to be held against measurement."""
    if "product" in name:
        return 0.75 if is_prefill else 0.85
    if name == "attention":
        return 0.6 if is_prefill else 0.8
    return 0.85


HEAD = """\
<!-- Written by `make docs` from benchmarks/roofline.py. -->

# Roofline

What a step must at least move and compute, and the time that this takes three cards: no implementation is faster.
Each input counts once and each output once, in bfloat16, so the floor is the same for every engine. Nothing here is
measured; `benchmarks/gpu_check.sh` measures, and prints how much of each floor's speed was reached on the card
it ran on, against that card's own copy bandwidth and matrix rate.

A floor is the larger of bytes / bandwidth and operations / rate. The cards by NVIDIA's datasheets ("NVIDIA A100
Tensor Core GPU", "NVIDIA H100 Tensor Core GPU", "NVIDIA H200 Tensor Core GPU"; the SXM form; the datasheets of H100
and H200 print bfloat16 with sparsity, 1,979 TFLOP/s, of which half is dense):

| Card | Memory | bfloat16, dense | Operations a byte where both take as long |
|---|---|---|---|
"""

SHARES = """\
## What the design should reach

Shares of the floor's speed that the kernels aim at, to be held against measurement. Products are the vendor
library's. Decode attention streams keys and values once for all query heads of a group, so it should come near the copy
bandwidth; prefill attention is bound by the matrix units, which the softmax between two products leaves idle for a
part of the time. Below about a megabyte a launch takes longer than the bytes, and no share is aimed at.

| Kernel | decode | prefill |
|---|---|---|
"""

HOST = """\
A step of plain launches also costs the host: {per_layer} launches a layer, so {launches}. Where a launch takes the
host longer than its kernel takes the card, the host is the floor: that is so for small models at small batches,
until steps are recorded and replayed (CUDA graphs).
"""


def render() -> str:
    """The page."""
    parts = [HEAD, *(_card_row(name, card) for name, card in CARDS.items())]
    parts += ["\n", SHARES, *_share_rows(), "\n"]
    counts = ", ".join(
        f"{LAUNCHES_PER_LAYER * SHAPES[name].num_layers} for {name}" for name in SHOWN
    )
    parts += [HOST.format(per_layer=LAUNCHES_PER_LAYER, launches=counts)]
    for name in SHOWN:
        parts += ["\n", *_model(name, SHAPES[name])]
    return "".join(parts)


def _card_row(name: str, card: Card) -> str:
    balance = card.flops_per_s / card.bytes_per_s
    return (
        f"| {name} | {card.bytes_per_s / 1e9:,.0f} GB/s | {card.flops_per_s / 1e12:.0f} TFLOP/s "
        f"| {balance:.0f} |\n"
    )


def _share_rows() -> list[str]:
    names = ("products", "attention", "norms, rotary and store, gate, copies")
    keys = ("product", "attention", "rest")
    return [
        f"| {name} | {aimed_share(key, False):.0%} | {aimed_share(key, True):.0%} |\n"
        for name, key in zip(names, keys, strict=True)
    ]


def _model(name: str, shape: Shape) -> list[str]:
    decode = [(CONTEXT, 1)] * 32
    prefill = [(PROMPT, PROMPT)]
    return [
        f"## {name}\n\n",
        f"Steps: decodes over contexts of {CONTEXT} tokens, and one prompt of {PROMPT}.\n\n",
        _table_head(),
        *(
            _row(f"decode step, batch {batch}", step(shape, [(CONTEXT, 1)] * batch))
            for batch in BATCHES
        ),
        _row(f"prefill of {PROMPT}", step(shape, prefill)),
        _row("copy of one block, all layers", copy_block(shape)),
        f"\nKernels of one layer, decoding at batch 32 over {CONTEXT} tokens:\n\n",
        _table_head(),
        *(_row(kernel, work) for kernel, work in layer_kernels(shape, decode).items()),
        f"\nKernels of one layer, a prompt of {PROMPT} tokens:\n\n",
        _table_head(),
        *(_row(kernel, work) for kernel, work in layer_kernels(shape, prefill).items()),
    ]


def _table_head() -> str:
    cards = " | ".join(name.partition(" ")[0] for name in CARDS)
    return f"| | MB | GFLOP | bound on H100 | {cards} |\n|---|---|---|---|{'---|' * len(CARDS)}\n"


def _row(name: str, work: Work) -> str:
    floors = " | ".join(_time(work.floor_s(card)) for card in CARDS.values())
    bound = work.bound(CARDS["H100 80 GB SXM"])
    return (
        f"| {name} | {work.num_bytes / 1e6:,.2f} | {work.flops / 1e9:,.2f} | {bound} | {floors} |\n"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} µs"


if __name__ == "__main__":
    sys.stdout.write(render())
