"""The kernels beside attention, compiled as real models launch them: everything fits, nothing spills."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels import triton_activation, triton_kv_store, triton_norm
from octavo.kernels.ops import LayerKVCache
from octavo.kernels.triton_aot import CompiledLaunch, compile_launches
from octavo.kernels.triton_blocks import BlockMover
from octavo.kernels.triton_gpu import ARCHITECTURES

ARCHS = list(ARCHITECTURES)
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
# (query heads, KV heads, head dim, rotary dim) of Llama 3, SmolLM2, Phi, Gemma.
HEADS = [(32, 8, 128, 128), (9, 3, 64, 64), (32, 32, 80, 32), (8, 4, 256, 256)]


def _meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _check(arch: str, call: Callable[[], object], num_launches: int = 1) -> list[CompiledLaunch]:
    launches = compile_launches(ARCHITECTURES[arch], call)
    assert len(launches) == num_launches
    for launch in launches:
        assert launch.num_spilled == 0, launch
        assert launch.shared_bytes <= ARCHITECTURES[arch].shared_bytes
        assert launch.programs_per_sm >= 1
    return launches


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_norms(arch: str, dtype: torch.dtype) -> None:
    def call() -> None:
        for size in (576, 4096, 16384):
            x, weight = _meta(7, size, dtype=dtype), _meta(size, dtype=dtype)
            triton_norm.rms_norm(x, weight, 1e-5)
            triton_norm.add_rms_norm(x, x, weight, 1e-5)
            triton_norm.layer_norm(x, weight, None, 1e-5)
            triton_norm.add_layer_norm(x, x, weight, weight, 1e-5)

    _check(arch, call, 12)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_norms_of_heads(arch: str, dtype: torch.dtype) -> None:
    def call() -> None:
        heads = _meta(7, 40, 128, dtype=dtype)
        triton_norm.norm_heads(heads[:, :32], _meta(128, dtype=dtype), 1e-5)
        triton_norm.norm_heads(heads[:, :32], _meta(4096, dtype=dtype), 1e-5)

    _check(arch, call, 2)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gates(arch: str, dtype: torch.dtype) -> None:
    def call() -> None:
        for size in (1536, 14336):
            x = _meta(7, 2 * size, dtype=dtype)
            triton_activation.silu_and_mul(x)
            triton_activation.gelu_and_mul(x)
            triton_activation.gelu(x, is_tanh=False)
            triton_activation.gelu(x, is_tanh=True)

    _check(arch, call, 8)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "has_norm"),
    [(BF16, BF16, False), (BF16, BF16, True), (BF16, FP8, True), (FP32, FP32, False)],
)
def test_rotary_store(
    arch: str, dtype: torch.dtype, cache_dtype: torch.dtype, has_norm: bool
) -> None:

    def call() -> None:
        for num_q, num_kv, head_dim, rotary_dim in HEADS:
            heads = _meta(5, num_q + 2 * num_kv, head_dim, dtype=dtype)
            q, (k, v) = heads[:, :num_q], heads[:, num_q:].chunk(2, dim=1)
            key = _meta(9, 16, num_kv, head_dim, dtype=cache_dtype)
            norm = _meta(head_dim, dtype=dtype) if has_norm else None
            triton_kv_store.rotary_store(
                q,
                k,
                v,
                _meta(5, dtype=torch.int64),
                _meta(99, rotary_dim, dtype=torch.float32),
                LayerKVCache(key, key),
                _meta(5, dtype=torch.int64),
                q_norm=norm,
                k_norm=norm,
                eps=1e-6,
            )

    _check(arch, call, len(HEADS))


@pytest.mark.parametrize("arch", ARCHS)
def test_moves(arch: str) -> None:
    def call() -> None:
        for size in (16 * 8 * 128, 16 * 3 * 64, 20):
            caches = [LayerKVCache(_meta(9, size), _meta(9, size))] * 4
            BlockMover().move(
                caches, caches, _meta(3, dtype=torch.int64), _meta(3, dtype=torch.int64)
            )

    _check(arch, call, 3)
