"""The native ops at every level of instructions that they are compiled for, against the oracle.

Levels that this processor has are loaded as they would be; NEON runs in an emulator. The other files test
everything, but only what this processor gets.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.engine.models.dequantize import dequantize
from octavo.kernels import cpu_build
from octavo.kernels.cpu_ops import CpuOps
from octavo.kernels.cpu_structs import declare
from octavo.kernels.ops import KVScales, LayerKVCache, QuantizedRows, SamplingTensors
from octavo.kernels.reference import ReferenceOps

pytestmark = pytest.mark.native

REFERENCE = ReferenceOps()
TARGETS = {target.name: target for target in cpu_build.portable_targets()}
NEON = "aarch64"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
QUICK = "-O1"  # instructions are the same, and compiled in half the time


@pytest.fixture(scope="module", params=[*TARGETS, NEON])
def ops(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WideOps]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == NEON and platform.machine() != NEON:
        yield from _emulated(folder)
    elif request.param != NEON:
        yield WideOps(_load(TARGETS[request.param], folder))
    else:
        pytest.skip("this processor's own tests run NEON")


def _load(target: cpu_build.Target, folder: Path) -> ctypes.CDLL:
    known = {word for value in cpu_build._cpu_lines().get("flags", ()) for word in value.split()}
    if not target.needs <= known:
        pytest.skip(f"this processor lacks {', '.join(sorted(target.needs - known))}")
    compiler = cpu_build.find_compiler()
    assert compiler is not None
    quick = cpu_build.Target(target.name, tuple((*flags, QUICK) for flags in target.flags))
    return cpu_build._load(
        cpu_build.build(compiler, quick, cpu_build.SOURCES, folder) / "octavo_cpu.so"
    )


def _emulated(folder: Path) -> Iterator[WideOps]:
    for tool in (CROSS_COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: apt-get install g++-aarch64-linux-gnu qemu-user")
    driver = _driver()
    program = driver.build_driver(CROSS_COMPILER, [QUICK, "-static"], folder)
    library = driver.DrivenLibrary([EMULATOR, str(program)])
    yield WideOps(declare(library))
    library.close()


@cache
def _driver() -> ModuleType:
    """native_driver.py, which lies beside this file and in no package."""
    path = Path(__file__).with_name("native_driver.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WideOps(CpuOps):
    """Takes keys, values and queries of any type, as the tests' batches have them."""

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
    ) -> None:
        super().store_kv(k.float(), v.float(), cache, slot_mapping, kv_scales)

    def attention(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().attention(q.float(), *args, **kwargs)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_blocks(type: str, out_features: int, groups: int) -> QuantizedRows:
    """Any numbers, and scales as models have them."""
    num_factors = 2 if type == "Q4_1" else 1
    size = num_factors * 2 + (32 if type == "Q8_0" else 16)
    random = torch.Generator().manual_seed(7)
    blocks = torch.randint(0, 256, (out_features, groups, size), generator=random).byte()
    factors = draw(out_features, groups, num_factors) * 0.02
    blocks[:, :, : 2 * num_factors] = factors.half().view(torch.uint8)
    return QuantizedRows(blocks.flatten(1), type)


def assert_near(one: Tensor, other: Tensor, tolerance: float) -> None:
    """Nowhere further apart than a part of the largest number."""
    assert torch.isfinite(one).all()
    assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("size", [1, 33, 100])
def test_rows(size: int, ops: CpuOps) -> None:
    x, residual, weight = draw(5, size), draw(5, size, seed=1), draw(size, seed=2)
    for table in (draw(9, size), draw(9, size).bfloat16()):
        ids = torch.tensor([3, 0, 8])
        assert torch.equal(ops.embed(ids, table), table[ids].float())
    assert_near(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), 1e-6)
    expected, total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    normed, summed = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    assert_near(normed, expected, 1e-6)
    bias = draw(size, seed=3)
    expected = REFERENCE.layer_norm(x, weight, bias, 1e-5)
    assert_near(ops.layer_norm(x, weight, bias, 1e-5), expected, 1e-6)
    assert torch.equal(ops.add(x, residual.clone()), x + residual)
    for is_tanh in (False, True):
        expected = REFERENCE.gelu(x * 20, is_tanh=is_tanh)
        assert_near(ops.gelu(x * 20, is_tanh=is_tanh), expected, 1e-6)
    pair = draw(5, 2 * size) * 20
    assert_near(ops.silu_and_mul(pair), REFERENCE.silu_and_mul(pair), 1e-6)
    assert_near(ops.gelu_and_mul(pair), REFERENCE.gelu_and_mul(pair), 1e-6)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (80, 50)])
def test_rotary(head_dim: int, rotary_dim: int, ops: CpuOps) -> None:
    q, k, cos_sin = draw(3, 4, head_dim), draw(3, 2, head_dim), draw(11, rotary_dim)
    positions = torch.tensor([10, 0, 4])
    expected = REFERENCE.rotary(q, k, positions, cos_sin)
    for one, other in zip(ops.rotary(q, k, positions, cos_sin), expected, strict=True):
        assert_near(one, other, 1e-6)


@pytest.mark.parametrize("type", ["float32", "bfloat16", "Q4_0", "Q4_1", "Q8_0"])
def test_products(type: str, ops: CpuOps) -> None:
    """And a row by itself is bit-equal to the row among others."""
    out_features, groups = 70, 3
    bias, x = draw(out_features, seed=3), draw(37, groups * 32, seed=4)
    if type.startswith("Q"):
        rows = draw_blocks(type, out_features, groups)
        packed = ops.pack_linear(rows, bias)
        weight = dequantize(rows.blocks.view(out_features, -1), type, torch.float32)
        weight = weight.view(out_features, -1)
        tolerance = 1e-2  # activations are bytes
    else:
        weight = draw(out_features, groups * 32)[:, :-1].to(getattr(torch, type))
        x = x[:, :-1].contiguous()
        packed = ops.pack_linear(weight, bias)
        tolerance = 1e-6 if type == "float32" else 1e-2
    product = ops.linear(x, packed)
    assert_near(product, x @ weight.float().T + bias, tolerance)
    for row in (0, 20, 36):
        assert torch.equal(ops.linear(x[row : row + 1], packed)[0], product[row])


@pytest.mark.parametrize("type", ["float32", "bfloat16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_experts(type: str, renormalise: bool, ops: CpuOps) -> None:
    """And a row by itself is bit-equal to the row among others."""
    num_experts, hidden, mlp = 6, 64, 32
    x, logits = draw(37, hidden), draw(37, num_experts, seed=4)
    shapes = [(2 * mlp, hidden), (hidden, mlp)]
    if type.startswith("Q"):
        blocks = [[draw_blocks(type, n, k // 32)] * num_experts for n, k in shapes]
        packed = ops.pack_experts(blocks[0], blocks[1], num_experts)
        dense = [
            [dequantize(one.blocks.view(n, -1), type, torch.float32).view(n, k) for one in part]
            for part, (n, k) in zip(blocks, shapes, strict=True)
        ]
    else:
        dense = [[(draw(n, k, seed=e) / k**0.5) for e in range(num_experts)] for n, k in shapes]
        dense = [[one.to(getattr(torch, type)) for one in part] for part in dense]
        packed = ops.pack_experts(dense[0], dense[1], num_experts)
    options: dict[str, Any] = {"top_k": 3, "renormalise": renormalise}
    mixed = ops.routed_experts(x, logits, packed, **options)
    oracle = REFERENCE.pack_experts(dense[0], dense[1], num_experts)
    expected = REFERENCE.routed_experts(x, logits, oracle, **options)
    assert_near(mixed, expected, 1e-5 if type == "float32" else 2e-2)
    for row in (0, 20, 36):
        alone = ops.routed_experts(x[row : row + 1], logits[row : row + 1], packed, **options)
        assert torch.equal(alone[0], mixed[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(13, 1), (64, 16), (80, 5), (32, 48)])
@pytest.mark.parametrize("limits", [{}, {"window": 6, "soft_cap": 3.0}])
def test_attention(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    limits: dict[str, Any],
    ops: CpuOps,
    make_batch: Any,
    make_shape: Any,
) -> None:
    """And a row by itself is bit-equal to the row among others."""
    shape = make_shape(6, 2, head_dim, block_size, dtype)
    rows = [(12, 1), (9, 9), (130, 1), (70, 20), (1, 1)]
    batch = make_batch(rows, shape)
    out = batch.run(ops, **limits)
    expected = torch.from_numpy(batch.dense(**limits)).float()
    assert_near(out, expected, 1e-5 if dtype == torch.float32 else 1e-2)
    end = np.cumsum([count for _, count in rows])
    for row in (2, 3):
        alone = make_batch(rows[row : row + 1], shape)
        alone.keys, alone.values, alone.queries = (
            [whole[row]] for whole in (batch.keys, batch.values, batch.queries)
        )
        among = out[end[row] - rows[row][1] : end[row]]
        assert torch.equal(alone.run(ops, **limits), among)


@pytest.mark.parametrize("vocab_size", [5, 1003])
def test_sampling(vocab_size: int, ops: CpuOps) -> None:
    num_rows = 24
    logits = draw(num_rows, vocab_size) * 3
    logits[::5, ::3] = -torch.inf
    kinds = torch.arange(num_rows)
    params = SamplingTensors(
        temperature=torch.where(kinds % 4 == 0, 0.0, 0.8),
        top_k=torch.where(kinds % 3 == 0, 4, 0),
        top_p=torch.where(kinds % 2 == 0, 0.7, 1.0),
        min_p=torch.where(kinds % 7 == 0, 0.1, 0.0),
        seed=kinds,
        position=kinds * 3,
    )
    assert torch.equal(ops.sample(logits, params), REFERENCE.sample(logits, params))
