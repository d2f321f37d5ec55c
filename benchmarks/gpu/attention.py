"""Attention against its floor, and the same attention by PyTorch's own kernels over contiguous keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import roofline
import torch
from model_shapes import SHAPES, Shape
from torch.nn import functional

from .common import Machine, Row, paged_batch, timed

DECODES = [(1, 1024), (1, 8192), (32, 1024), (256, 1024)]
PROMPTS = [(1, 2048), (1, 8192), (8, 1024)]
UNEVEN = {
    "a decode over 8192 among 63 over 128": [(8192, 1), *[(128, 1)] * 63],
    "a prompt of 1024 among 64 decodes": [(1024, 1024), *[(1024, 1)] * 64],
}
"""Short sequences beside long ones, prompts beside decodes: nothing of PyTorch takes these."""


def run(machine: Machine) -> Iterator[Row]:
    names = ("tiny",) if machine.is_dry else ("Llama-3-8B", "Qwen3-0.6B")
    decodes, prompts = ([(2, 40)], [(1, 20)]) if machine.is_dry else (DECODES, PROMPTS)
    for name in names:
        shape = SHAPES[name]
        for count, length in decodes:
            yield from _pair(
                f"{name}, {count} decodes over {length}", shape, [(length, 1)] * count, machine
            )
        for count, length in prompts:
            rows = [(length, length)] * count
            yield from _pair(f"{name}, {count} prompts of {length}", shape, rows, machine)
    for title, rows in {} if machine.is_dry else UNEVEN.items():
        yield _paged(f"{names[0]}, {title}", SHAPES[names[0]], rows, machine)


def _pair(title: str, shape: Shape, rows: list[tuple[int, int]], machine: Machine) -> Iterator[Row]:
    yield _paged(title, shape, rows, machine)
    seq_len, count = rows[0]

    def draw(num_heads: int, num_tokens: int) -> torch.Tensor:
        size = (len(rows), num_heads, num_tokens, shape.head_dim)
        return torch.randn(size, device=machine.device).bfloat16()

    q = draw(shape.num_q_heads, count)
    k, v = draw(shape.num_kv_heads, seq_len), draw(shape.num_kv_heads, seq_len)
    attend = partial(
        functional.scaled_dot_product_attention, q, k, v, is_causal=count > 1, enable_gqa=True
    )
    yield timed(f"PyTorch's attention, {title}", attend, roofline.attention(shape, rows), machine)


def _paged(title: str, shape: Shape, rows: list[tuple[int, int]], machine: Machine) -> Row:
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    batch = paged_batch(rows, heads, torch.bfloat16, machine.device)
    attend = partial(machine.ops().attention, *batch, scale=shape.head_dim**-0.5)
    return timed(f"paged attention, {title}", attend, roofline.attention(shape, rows), machine)
