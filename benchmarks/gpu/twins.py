"""Every kernel against its twin in ``kernels/reference.py``, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import triton_activation, triton_kv_store, triton_norm
from octavo.kernels.ops import KVCacheSpec, KVScales, LayerKVCache, SamplingTensors
from octavo.kernels.reference import ReferenceOps

from .common import Machine, Row, attempt, checked, paged_batch

ORACLE = ReferenceOps()
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FP8 = torch.float8_e4m3fn
BATCHES = {
    "decodes": [(37, 1), (5, 1), (1, 1), (1500, 1), (16, 1)],
    "prompts": [(7, 7), (130, 130), (33, 33)],
    "chunks": [(90, 30), (300, 5), (33, 32)],
    "mixed": [(700, 1), (64, 64), (33, 1), (12, 4)],
}


def run(machine: Machine) -> Iterator[Row]:
    torch.manual_seed(0)
    for group in (_elementwise, _mixtures, _stores, _moves, _attention, _sampling):
        yield from group(machine)


def difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the larger of 1 and the expected number; NaN counts as infinite."""
    wide = expected.float()
    apart = ((got.float() - wide).abs() / wide.abs().clamp(min=1.0)).nan_to_num(float("inf"))
    return float(apart.max()) if apart.numel() else 0.0


def _elementwise(machine: Machine) -> Iterator[Row]:
    for dtype, tolerance in TOLERANCE.items():
        for size in (80, 576) if machine.is_dry else (80, 576, 4096, 16384):
            name = f"norm with residual, {size}, {_of(dtype)}"
            yield checked(name, tolerance, partial(_norm, size, dtype, machine.device))
        x = torch.randn(3, 2 * 1536, device=machine.device).to(dtype)
        for name in ("silu_and_mul", "gelu_and_mul"):
            ours, theirs = getattr(triton_activation, name), getattr(ORACLE, name)
            measure = partial(lambda f, g, x: difference(f(x), g(x)), ours, theirs, x)
            yield checked(f"{name}, {_of(dtype)}", tolerance, measure)


def _norm(size: int, dtype: torch.dtype, device: torch.device) -> float:
    x, residual = (torch.randn(3, size, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(size, device=device).to(dtype)
    expected = ORACLE.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got = triton_norm.add_rms_norm(x, residual, weight, 1e-5)
    return max(difference(*pair) for pair in zip(got, expected, strict=True))


def _mixtures(machine: Machine) -> Iterator[Row]:
    """Few and many rows for an expert, each with the tile that is made for it."""
    shape = (4, 2, 32, 48) if machine.is_dry else (16, 4, 1024, 512)
    for dtype, tolerance in TOLERANCE.items():
        for num_tokens in (3,) if machine.is_dry else (3, 300):
            name = f"routed experts, {num_tokens} tokens, {_of(dtype)}"
            yield checked(name, tolerance, partial(_mixed, shape, num_tokens, dtype, machine))


def _mixed(
    shape: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype, machine: Machine
) -> float:
    num_experts, top_k, hidden, mlp = shape

    def draw(*size: int) -> Tensor:
        return (torch.randn(size, device=machine.device) / size[-1] ** 0.5).to(dtype)

    experts = (draw(num_experts, 2 * mlp, hidden), draw(num_experts, hidden, mlp))
    x = draw(num_tokens, hidden) * hidden**0.5
    logits = torch.randn(num_tokens, num_experts, device=machine.device)
    got, expected = (
        ops.routed_experts(
            x, logits, ops.pack_experts(*experts, num_experts), top_k=top_k, renormalise=True
        )
        for ops in (machine.ops(), ORACLE)
    )
    return difference(got, expected)


def _stores(machine: Machine) -> Iterator[Row]:
    for head_dim, dtype, cache_dtype, has_norm in (
        (64, torch.float32, torch.float32, False),
        (80, torch.bfloat16, torch.bfloat16, True),
        (128, torch.bfloat16, torch.bfloat16, False),
        (128, torch.bfloat16, FP8, True),
        (256, torch.float16, torch.float16, True),
    ):
        name = f"rotary and store, head {head_dim}, {_of(dtype)} into {_of(cache_dtype)}"
        measure = partial(_store, head_dim, dtype, cache_dtype, has_norm, machine.device)
        tolerance = TOLERANCE[dtype] * (2 if has_norm else 1)  # one rounding more
        yield checked(name + (" with norms" if has_norm else ""), tolerance, measure)


def _store(
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    has_norm: bool,
    device: torch.device,
) -> float:
    heads = torch.randn(9, 12, head_dim, device=device).to(dtype)
    q, (k, v) = heads[:, :8], heads[:, 8:].chunk(2, dim=1)
    norms = {}
    if has_norm:
        weight = torch.rand(head_dim, device=device).to(dtype) + 0.5
        norms = {"q_norm": weight, "k_norm": weight, "eps": 1e-6}
    angles = 3 * torch.randn(40, head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.arange(16, 25, device=device)
    slots[4] = -1
    spec = KVCacheSpec(3, 16, 2, head_dim, cache_dtype)
    caches = [ORACLE.allocate_kv_cache(spec, device) for _ in range(2)]
    step = (q, k, v, torch.arange(3, 12, device=device), cos_sin)
    scales = KVScales(0.5, 0.25)
    got = triton_kv_store.rotary_store(*step, caches[0], slots, **norms, kv_scales=scales)
    wanted = ORACLE.rotary_store(*step, caches[1], slots, **norms, kv_scales=scales)
    stored = max(difference(*pair) for pair in zip(*caches, strict=True))
    # A number may fall on the other side of the middle between two of fp8's: a step is an eighth.
    return max(difference(got, wanted), max(0.0, stored - 0.13) if cache_dtype == FP8 else stored)


def _moves(machine: Machine) -> Iterator[Row]:
    yield checked("copied blocks", 0.0, partial(_copied, machine))
    if not machine.is_dry:
        for by_kernel in (True, False):
            way = "the kernel" if by_kernel else "copies"
            yield checked(
                f"blocks to the host and back by {way}", 0.0, partial(_swapped, by_kernel, machine)
            )


def _caches(num_blocks: int, device: torch.device) -> list[LayerKVCache]:
    shape = (num_blocks, 16, 2, 64)
    return [
        LayerKVCache(*(torch.randn(shape).bfloat16().to(device) for _ in range(2)))
        for _ in range(4)
    ]


MOVED = torch.tensor([[0, 3, 5], [7, 1, 2]])


def _copied(machine: Machine) -> float:
    caches = _caches(8, machine.device)
    before = caches[3].value.clone()
    machine.ops().copy_blocks(caches, *MOVED.to(machine.device))
    return difference(caches[3].value[MOVED[1]], before[MOVED[0]])


def _swapped(by_kernel: bool, machine: Machine) -> float:
    ops, here = machine.ops(), _caches(8, machine.device)
    if by_kernel and not ops.reads_host:
        raise ValueError("this GPU's kernels cannot use host memory by its address")
    ops.reads_host = by_kernel
    host = [
        LayerKVCache(*(x.cpu().pin_memory() for x in cache)) for cache in _caches(8, machine.device)
    ]
    back = _caches(8, machine.device)
    ops.swap_blocks(here, host, *MOVED)
    ops.swap_blocks(host, back, MOVED[1], MOVED[0])
    torch.cuda.synchronize(machine.device)
    return max(
        difference(one[MOVED[0]], other[MOVED[0]])
        for pair in zip(here, back, strict=True)
        for one, other in zip(*pair, strict=True)
    )


def _attention(machine: Machine) -> Iterator[Row]:
    """Every head size in bfloat16, and one case each of what else is offered."""
    device = machine.device
    dims = (64,) if machine.is_dry else (64, 80, 96, 128, 256)
    batches = {"mixed": [(40, 1), (9, 9), (33, 3)]} if machine.is_dry else BATCHES
    cases: list[tuple[str, int, torch.dtype, torch.dtype, dict[str, Any]]] = [
        ("", head_dim, torch.bfloat16, torch.bfloat16, {}) for head_dim in dims
    ]
    scales = KVScales(0.5, 0.25)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 9.0, -9.0, 1.0, 0.1], device=device)
    for name, dtype, cache_dtype, options in (
        ("float32", torch.float32, torch.float32, {}),
        ("fp8 cache", torch.bfloat16, FP8, {"kv_scales": scales}),
        ("window", torch.bfloat16, torch.bfloat16, {"window": 100}),
        ("soft cap", torch.bfloat16, torch.bfloat16, {"soft_cap": 20.0}),
        ("sinks", torch.bfloat16, torch.bfloat16, {"sinks": sinks}),
    ):
        cases.append((f", {name}", 64 if machine.is_dry else 128, dtype, cache_dtype, options))
    for kind, head_dim, dtype, cache_dtype, options in cases:
        for name, rows in batches.items() if not options else list(batches.items())[-1:]:
            measure = partial(_attended, rows, head_dim, dtype, cache_dtype, options, machine)
            title = f"attention, {name}, head {head_dim}{kind}"
            yield checked(title, 2 * TOLERANCE[dtype], measure)


def _attended(
    rows: list[tuple[int, int]],
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    options: dict[str, Any],
    machine: Machine,
) -> float:
    batch = paged_batch(rows, (8, 2, head_dim), dtype, machine.device, cache_dtype=cache_dtype)
    options = {"scale": head_dim**-0.5, **options}
    got = machine.ops().attention(*batch, **options)
    return difference(got, ORACLE.attention(*batch, **options))


def _sampling(machine: Machine) -> Iterator[Row]:
    num_rows, vocab_size = 6, 500 if machine.is_dry else 50_000
    logits = 4 * torch.randn(num_rows, vocab_size, device=machine.device)
    params = SamplingTensors(
        torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 1.0]),
        torch.tensor([0, 0, 50, 0, 7, 0]),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 0.99]),
        torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.0]),
        torch.arange(6),
        torch.arange(6) + 100,
    )
    expected = ORACLE.sample(logits.cpu(), params).tolist()

    def draw() -> Row:
        on_device = SamplingTensors(*(values.to(machine.device) for values in params))
        got = machine.ops().sample(logits.clone(), on_device).tolist()
        return {"ok": got == expected, "note": f"{got}"}

    yield attempt("sampled tokens", draw)


def _of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
