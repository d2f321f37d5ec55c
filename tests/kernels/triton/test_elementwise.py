"""Norms and activations against their twins: any length, rows that are part of wider ones, poison outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import triton_activation, triton_norm
from octavo.kernels.reference import ReferenceOps

ORACLE = ReferenceOps()
# The interpreter cuts to bfloat16 where a GPU rounds: a unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)
UNGATED: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (partial(triton_activation.gelu, is_tanh=is_tanh), partial(ORACLE.gelu, is_tanh=is_tanh))
    for is_tanh in (False, True)
]
GATES: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (triton_activation.silu_and_mul, ORACLE.silu_and_mul),
    (triton_activation.gelu_and_mul, ORACLE.gelu_and_mul),
]


def _randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _part(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows that lie in a wider tensor, with NaN between them."""
    wide = torch.full((size[0], size[1] + 5), float("nan"), dtype=dtype)
    wide[:, : size[1]] = _randn(*size, dtype=dtype, seed=seed)
    return wide[:, : size[1]]


def _assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 576), (3, 80), (2, 1), (1, 3072)])
def test_norms(dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, residual = _part(*size, dtype=dtype), _part(*size, dtype=dtype, seed=1)
    weight = _randn(size[1], dtype=dtype, seed=2)
    _assert_close(triton_norm.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5))
    expected = ORACLE.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got = triton_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert got[1] is residual
    for one, other in zip(got, expected, strict=True):
        _assert_close(one, other)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("size", [(1, 576), (3, 80), (2, 1), (1, 3072)])
def test_layer_norms(dtype: torch.dtype, has_bias: bool, size: tuple[int, int]) -> None:
    x, residual = _part(*size, dtype=dtype), _part(*size, dtype=dtype, seed=1)
    weight = _randn(size[1], dtype=dtype, seed=2)
    bias = _randn(size[1], dtype=dtype, seed=3) if has_bias else None
    far = x + 4  # a mean that what lies past the row's end must not spoil
    got = triton_norm.layer_norm(far, weight, bias, 1e-5)
    _assert_close(got, ORACLE.layer_norm(far, weight, bias, 1e-5))
    expected = ORACLE.add_layer_norm(x, residual.clone(), weight, bias, 1e-5)
    both = triton_norm.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert both[1] is residual
    for one, other in zip(both, expected, strict=True):
        _assert_close(one, other)


@pytest.mark.smoke
def test_a_wide_weight_is_not_rounded() -> None:
    x, weight = _randn(2, 80, dtype=torch.bfloat16), 1 + _randn(80, seed=1) / 200
    got = triton_norm.rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16
    _assert_close(got, ORACLE.rms_norm(x, weight, 1e-6))
    assert not torch.equal(got, triton_norm.rms_norm(x, weight.bfloat16(), 1e-6))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "is_whole"), [(64, False), (24, False), (24, True), (1, True)]
)
def test_norms_of_heads(dtype: torch.dtype, head_dim: int, is_whole: bool) -> None:
    qkv = _randn(3, 7, head_dim, dtype=dtype)
    before, heads = qkv.clone(), qkv[:, 1:5]
    weight = _randn(4 * head_dim if is_whole else head_dim, dtype=dtype, seed=1)
    expected, _ = ORACLE.qk_norm(heads, heads, weight, weight, 1e-5)
    triton_norm.norm_heads(heads, weight, 1e-5)
    _assert_close(heads, expected)
    assert torch.equal(qkv[:, 0], before[:, 0])
    assert torch.equal(qkv[:, 5:], before[:, 5:])


@pytest.mark.smoke
def test_norms_of_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a norm of 7 for 2 heads of 8"):
        triton_norm.norm_heads(torch.ones(1, 2, 8), torch.ones(7), 1e-5)


@given(st.integers(0, 3), st.integers(1, 700), st.sampled_from(DTYPES), st.integers(0, 99))
@settings(max_examples=25)
def test_norms_of_any_length(num_rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = _randn(num_rows, size, dtype=dtype, seed=seed), _randn(size, dtype=dtype)
    _assert_close(triton_norm.rms_norm(x, weight, 1e-6), ORACLE.rms_norm(x, weight, 1e-6))


@pytest.mark.smoke
def test_norms_square_in_float32() -> None:
    """300 squared is beyond float16's range."""
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    out = triton_norm.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(out, torch.ones(1, 8, dtype=torch.float16))


@pytest.mark.smoke
def test_a_row_too_long_is_refused() -> None:
    x = torch.empty(1, triton_norm.MAX_SIZE + 1, device="meta")
    with pytest.raises(ValueError, match="65537"):
        triton_norm.rms_norm(x, x[0], 1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [33, 1024, 1536])
@pytest.mark.parametrize("gate", GATES, ids=["silu", "gelu"])
def test_gates(
    dtype: torch.dtype,
    size: int,
    gate: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
) -> None:
    x = _part(2, 2 * size, dtype=dtype)
    _assert_close(gate[0](x), gate[1](x))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [33, 1024, 1536])
@pytest.mark.parametrize("kind", UNGATED, ids=["erf", "tanh"])
def test_gelu(
    dtype: torch.dtype,
    size: int,
    kind: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
) -> None:
    x = _part(2, size, dtype=dtype) * 3
    _assert_close(kind[0](x), kind[1](x))
    far = torch.tensor([[-300.0, -90.0, 0.0, 90.0, 300.0]])
    _assert_close(kind[0](far), torch.tensor([[0.0, 0.0, 0.0, 90.0, 300.0]]))


@pytest.mark.smoke
@pytest.mark.parametrize("gate", GATES, ids=["silu", "gelu"])
def test_gates_of_large_numbers(
    gate: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
) -> None:
    """Where exp overflows, the result is still the number itself or nothing."""
    x = torch.tensor([[-300.0, -90.0, 0.0, 90.0, 300.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    _assert_close(gate[0](x), torch.tensor([[0.0, 0.0, 0.0, 90.0, 300.0]]))


@pytest.mark.smoke
def test_a_nan_row_leaves_the_others_bit_equal() -> None:
    x, weight = _randn(4, 66), _randn(66, seed=1)
    poisoned = x.clone()
    poisoned[2] = float("nan")
    for op in (
        lambda rows: triton_norm.rms_norm(rows, weight, 1e-5),
        lambda rows: triton_norm.layer_norm(rows, weight, weight, 1e-5),
        *(kind[0] for kind in UNGATED),
        triton_activation.silu_and_mul,
        triton_activation.gelu_and_mul,
    ):
        assert torch.equal(op(x)[[0, 1, 3]], op(poisoned)[[0, 1, 3]])
        assert op(poisoned)[2].isnan().all()


@pytest.mark.smoke
def test_no_rows_are_no_launch() -> None:
    empty = torch.empty(0, 8)
    assert triton_norm.rms_norm(empty, torch.ones(8), 1e-5).shape == (0, 8)
    assert triton_activation.silu_and_mul(empty).shape == (0, 4)
    assert triton_activation.gelu(empty, is_tanh=False).shape == (0, 8)
