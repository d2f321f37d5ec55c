"""Each kernel's time against its floor on this card, at the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import roofline
import torch
from model_shapes import SHAPES, Shape

from octavo.kernels import triton_activation, triton_kv_store, triton_norm
from octavo.kernels.ops import LayerKVCache

from .common import Machine, Row, attempt, seconds_of, timed

NUM_COPIED = 32


def run(machine: Machine) -> Iterator[Row]:
    names = ("tiny",) if machine.is_dry else ("Llama-3-8B", "Qwen3-0.6B")
    for name in names:
        for num_tokens in (2,) if machine.is_dry else (32, 256, 2048):
            yield from _of_model(name, SHAPES[name], num_tokens, machine)
    yield from _moves(names[0], SHAPES[names[0]], machine)


def _of_model(name: str, shape: Shape, num_tokens: int, machine: Machine) -> Iterator[Row]:
    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, device=machine.device).bfloat16()

    x, residual = draw(num_tokens, shape.hidden_size), draw(num_tokens, shape.hidden_size)
    weight, gate = draw(shape.hidden_size), draw(num_tokens, 2 * shape.intermediate_size)
    num_q, num_kv = shape.num_q_heads, shape.num_kv_heads
    heads = draw(num_tokens, num_q + 2 * num_kv, shape.head_dim)
    q, (k, v) = heads[:, :num_q], heads[:, num_q:].chunk(2, dim=1)
    block_shape = (-(-num_tokens // 16), 16, num_kv, shape.head_dim)
    cache = LayerKVCache(draw(*block_shape), draw(*block_shape))
    places = torch.arange(num_tokens, device=machine.device)
    cos_sin = torch.randn(num_tokens, shape.head_dim, device=machine.device)
    kernels: dict[str, tuple[Callable[[], object], roofline.Work]] = {
        "norm with residual": (
            lambda: triton_norm.add_rms_norm(x, residual, weight, 1e-5),
            roofline.add_rms_norm(shape, num_tokens),
        ),
        "silu and multiply": (
            lambda: triton_activation.silu_and_mul(gate),
            roofline.silu_and_mul(shape, num_tokens),
        ),
        "rotary and store": (
            lambda: triton_kv_store.rotary_store(q, k, v, places, cos_sin, cache, places),
            roofline.rotary_store(shape, num_tokens),
        ),
    }
    for kernel, (call, work) in kernels.items():
        yield timed(f"{kernel}, {name}, {num_tokens} tokens", call, work, machine)


def _moves(name: str, shape: Shape, machine: Machine) -> Iterator[Row]:
    """Copies within the pool, and scattered blocks to the host by the kernel and by the copy engines."""
    size = (4 * NUM_COPIED, 16, shape.num_kv_heads, shape.head_dim)
    pool = [
        LayerKVCache(
            *(torch.zeros(size, dtype=torch.bfloat16, device=machine.device) for _ in range(2))
        )
        for _ in range(shape.num_layers)
    ]
    ops, src = machine.ops(), torch.arange(0, 2 * NUM_COPIED, 2)
    dst = torch.flip(src, (0,)) + 2 * NUM_COPIED
    on_device = (src.to(machine.device), dst.to(machine.device))
    work = roofline.copy_block(shape).times(NUM_COPIED)
    title = f"copy of {NUM_COPIED} blocks, {name}"
    yield timed(title, lambda: ops.copy_blocks(pool, *on_device), work, machine)
    if machine.is_dry:
        return
    host = [LayerKVCache(*(x.cpu().pin_memory() for x in cache)) for cache in pool]
    reads_host = ops.reads_host
    for way in ("the kernel", "copies") if reads_host else ("copies",):
        ops.reads_host = way == "the kernel"
        for direction, ends in {"to": (pool, host), "from": (host, pool)}.items():
            call = partial(ops.swap_blocks, *ends, src, dst)
            title = f"{NUM_COPIED} scattered blocks {direction} the host by {way}"
            yield attempt(title, partial(_rate, call, work.num_bytes / 2, machine))


def _rate(call: Callable[[], object], num_bytes: float, machine: Machine) -> Row:
    return {"value": num_bytes / seconds_of(call, machine) / 1e9, "unit": "GB/s"}
