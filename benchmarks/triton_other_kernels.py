"""Writes the table of the kernels beside attention in docs/kernels.md.

    python benchmarks/triton_other_kernels.py

Nothing is measured: registers, shared memory and occupancy are read from kernels compiled for each architecture as
a real layer launches them, bytes are counted from what their programs load and store.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import roofline
from model_shapes import SHAPES, Shape

from octavo.kernels import triton_activation, triton_kv_store, triton_norm
from octavo.kernels.ops import LayerKVCache
from octavo.kernels.triton_aot import compile_launches
from octavo.kernels.triton_blocks import BlockMover
from octavo.kernels.triton_gpu import ARCHITECTURES
from octavo.kernels.triton_kv_store import rotary_store_launch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
BEGIN, END = (
    "<!-- benchmarks/triton_other_kernels.py writes from here -->",
    "<!-- so far writes benchmarks/triton_other_kernels.py -->",
)
MODELS = ("Llama-3-8B", "Qwen3-0.6B", "SmolLM2-135M")
TOKENS = 5  # no size that a kernel is compiled for


class Case(NamedTuple):
    """One kernel at one model's shape."""

    kernel: str
    model: str
    launch: Callable[[], object]
    moved: float  # bytes a token
    least: float


def cases() -> Iterator[Case]:
    for name in MODELS:
        shape = SHAPES[name]
        yield _norm(name, shape)
        yield _gate(name, shape)
        for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
            yield _store(name, shape, cache_dtype)
        yield _move(name, shape)


def _meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _norm(name: str, shape: Shape) -> Case:
    x, weight = _meta(TOKENS, shape.hidden_size), _meta(shape.hidden_size)
    least = (roofline.add_rms_norm(shape, 2048).num_bytes) / 2048
    moved = 5 * roofline.WIDTH * shape.hidden_size  # the weight by every row
    call = lambda: triton_norm.add_rms_norm(x, x, weight, 1e-5)  # noqa: E731
    return Case("norm with residual", name, call, moved, least)


def _gate(name: str, shape: Shape) -> Case:
    x = _meta(TOKENS, 2 * shape.intermediate_size)
    least = roofline.silu_and_mul(shape, 1).num_bytes
    return Case("silu and multiply", name, lambda: triton_activation.silu_and_mul(x), least, least)


def _store(name: str, shape: Shape, cache_dtype: torch.dtype) -> Case:
    num_q, num_kv, head_dim = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    heads = _meta(TOKENS, num_q + 2 * num_kv, head_dim)
    q, (k, v) = heads[:, :num_q], heads[:, num_q:].chunk(2, dim=1)
    cache = LayerKVCache(*(_meta(9, 16, num_kv, head_dim, dtype=cache_dtype) for _ in range(2)))
    places, cos_sin = _meta(TOKENS, dtype=torch.int64), _meta(99, head_dim, dtype=torch.float32)
    least = roofline.rotary_store(shape, 1).num_bytes
    least -= 2 * num_kv * head_dim * (roofline.WIDTH - cache_dtype.itemsize)
    tile = rotary_store_launch(num_q, num_kv, head_dim, head_dim)["HEADS"]
    num_tiles = -(-num_q // tile) - (-num_kv // tile)
    moved = least + (num_tiles - 1) * 4 * head_dim  # the angles by every program
    kind = "fp8" if cache_dtype.itemsize == 1 else "bfloat16"
    call = lambda: triton_kv_store.rotary_store(q, k, v, places, cos_sin, cache, places)  # noqa: E731
    return Case(f"rotary and store, {kind}", name, call, moved, least)


def _move(name: str, shape: Shape) -> Case:
    size = (9, 16, shape.num_kv_heads, shape.head_dim)
    caches = [LayerKVCache(_meta(*size), _meta(*size))] * shape.num_layers
    ids = _meta(3, dtype=torch.int64)
    least = roofline.copy_block(shape).num_bytes / 16
    call = lambda: BlockMover().move(caches, caches, ids, ids)  # noqa: E731
    return Case("copy of a block, all layers", name, call, least, least)


def table() -> str:
    lines = [
        "| Kernel | Model | Moved a token | Least | GPU | Warps | Registers | Shared memory | Occupancy |\n",
        "|---|---|---|---|---|---|---|---|---|\n",
    ]
    for case in cases():
        for arch in ARCHITECTURES.values():
            (one,) = compile_launches(arch, case.launch)
            if one.num_spilled:
                raise RuntimeError(f"{case.kernel} for {case.model} spills on {arch.name}")
            lines.append(
                f"| {case.kernel} | {case.model} | {case.moved:,.0f} | {case.least:,.0f} | {arch.name} "
                f"| {one.num_warps} | {one.num_registers} | {one.shared_bytes} B | {one.occupancy:.0%} |\n"
            )
    return "".join(lines)


PROSE = """
## Norms, gates, rotary and store, copies

Bound by memory, so each makes one pass over it. `kernels/triton_norm.py` adds the residual and norms the sum in one;
`kernels/triton_activation.py` gates. `kernels/triton_kv_store.py` turns queries into a tensor of their own, turns
keys and writes them with the values to their slots, after a norm of each head where a model has one; e4m3 is
encoded by integer arithmetic, the same on every GPU. `kernels/triton_blocks.py` copies blocks in all layers by one
launch, through a table of the layers' addresses; the same kernel moves scattered blocks to and from pinned host
memory where the GPU can address that, and copies by the driver move long runs. Offsets are counted in 64 bits.
Sizes that are no power of two are masked. Their launches follow from the shapes alone; nothing is tuned.
"""


def main() -> None:
    """Rewrite what lies between the page's marks, or append them."""
    text = PAGE.read_text()
    if BEGIN not in text:
        text = f"{text}{PROSE}\n{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    made = f"{BEGIN}\n\nTriton {triton.__version__}; no kernel spills.\n\n{table()}\n{END}"
    PAGE.write_text(head + made + tail)


if __name__ == "__main__":
    main()
