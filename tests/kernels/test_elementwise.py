"""Norms, activations, rotary embedding and linear layers against the oracle or a formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import torch_linear
from octavo.kernels.ops import Ops
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_ops import TorchOps

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def _randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 576), (33, 80), (5, 1)])
def test_norms(dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, residual = _randn(*size, dtype=dtype), _randn(*size, dtype=dtype, seed=1)
    weight = _randn(size[1], dtype=dtype, seed=2)
    fast, oracle = TorchOps(), ReferenceOps()
    _assert_close(fast.rms_norm(x, weight, 1e-5), oracle.rms_norm(x, weight, 1e-5))
    expected = oracle.add_rms_norm(x, residual.clone(), weight, 1e-5)
    for got, wanted in zip(fast.add_rms_norm(x, residual, weight, 1e-5), expected, strict=True):
        _assert_close(got, wanted)


def test_rms_norm_is_the_formula(ops: Ops) -> None:
    x = torch.tensor([[3.0, 4.0]])
    out = ops.rms_norm(x, torch.tensor([1.0, 2.0]), 0.0)
    rms = math.sqrt(12.5)
    torch.testing.assert_close(out, torch.tensor([[3.0 / rms, 8.0 / rms]]))


def test_rms_norm_squares_in_float32(ops: Ops) -> None:
    """300 squared is beyond float16's range."""
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    out = ops.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(out, torch.ones(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_whole", [False, True], ids=["head", "token"])
def test_norms_of_queries_and_keys(dtype: torch.dtype, is_whole: bool) -> None:
    qkv = _randn(3, 8, 24, dtype=dtype)
    q, k = qkv[:, :4], qkv[:, 4:6]
    q_weight = _randn(4 * 24 if is_whole else 24, dtype=dtype, seed=1)
    k_weight = _randn(2 * 24 if is_whole else 24, dtype=dtype, seed=2)
    expected = ReferenceOps().qk_norm(q, k, q_weight, k_weight, 1e-5)
    got = TorchOps().qk_norm(q.clone(), k.clone(), q_weight, k_weight, 1e-5)
    for one, other in zip(got, expected, strict=True):
        _assert_close(one, other)


def test_norm_of_queries_and_keys_is_the_formula(ops: Ops) -> None:
    q = torch.tensor([[[3.0, 4.0], [6.0, 8.0]]])
    k = q[:, :1].clone()
    weight, whole = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    by_head = torch.tensor([[[3.0, 8.0], [3.0, 8.0]]]) / math.sqrt(12.5)
    got, key = ops.qk_norm(q.clone(), k.clone(), weight, weight, 0.0)
    torch.testing.assert_close(got, by_head)
    torch.testing.assert_close(key, by_head[:, :1])
    got, _ = ops.qk_norm(q.clone(), k.clone(), whole, weight, 0.0)
    by_token = torch.tensor([[[3.0, 8.0], [18.0, 32.0]]]) / math.sqrt(125 / 4)
    torch.testing.assert_close(got, by_token)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_and_sums(dtype: torch.dtype, ops: Ops) -> None:
    x, residual = _randn(5, 33, dtype=dtype), _randn(5, 33, dtype=dtype, seed=1)
    torch.testing.assert_close(ops.scale(x.clone(), 0.22), (x.float() * 0.22).to(dtype))
    torch.testing.assert_close(ops.add(x, residual.clone()), x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype: torch.dtype) -> None:
    x = _randn(7, 2 * 33, dtype=dtype)
    fast, oracle = TorchOps(), ReferenceOps()
    _assert_close(fast.silu_and_mul(x), oracle.silu_and_mul(x))
    _assert_close(fast.gelu_and_mul(x), oracle.gelu_and_mul(x))


def test_activations_are_the_formulas(ops: Ops) -> None:
    x = torch.tensor([[1.5, -2.0, 3.0, 0.5]])
    silu = [v / (1 + math.exp(-v)) for v in (1.5, -2.0)]
    gelu = [
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        for v in (1.5, -2.0)
    ]
    torch.testing.assert_close(ops.silu_and_mul(x), torch.tensor([[silu[0] * 3, silu[1] * 0.5]]))
    torch.testing.assert_close(ops.gelu_and_mul(x), torch.tensor([[gelu[0] * 3, gelu[1] * 0.5]]))


def test_rotary_turns_pairs_of_halves(ops: Ops) -> None:
    angle = torch.tensor([0.3, 1.1])
    cos_sin = torch.cat((angle.cos(), angle.sin())).expand(4, 4).contiguous()
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    rotated, _ = ops.rotary(q, q, torch.tensor([2]), cos_sin)
    for i in range(2):
        pair = torch.complex(q[0, 0, i], q[0, 0, i + 2]) * torch.polar(torch.tensor(1.0), angle[i])
        torch.testing.assert_close(rotated[0, 0, i], pair.real)
        torch.testing.assert_close(rotated[0, 0, i + 2], pair.imag)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 32), (2, 2)])
def test_rotary_equals_the_oracle(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    angles = _randn(50, rotary_dim // 2) * 3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q = _randn(6, 4, head_dim, dtype=dtype)
    k = _randn(6, 2, head_dim, dtype=dtype, seed=1)
    fast = TorchOps()
    for positions in (torch.tensor([0, 49, 3, 3, 7, 1]), torch.arange(6)):
        expected = ReferenceOps().rotary(q, k, positions, cos_sin)
        for got, wanted in zip(fast.rotary(q, k, positions, cos_sin), expected, strict=True):
            _assert_close(got, wanted)


def test_rotary_takes_views_of_one_product(ops: Ops) -> None:
    heads = _randn(5, 6, 8)
    cos_sin = _randn(9, 8)
    q, k = ops.rotary(heads[:, :4], heads[:, 4:], torch.arange(5), cos_sin)
    expected = ops.rotary(heads[:, :4].clone(), heads[:, 4:].clone(), torch.arange(5), cos_sin)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


@given(
    num_tokens=st.integers(0, 40),
    num_in=st.sampled_from([1, 3, 5, 64, 80, 576]),
    num_out=st.sampled_from([1, 7, 33, 96, 128]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
@settings(max_examples=60)
def test_linear_equals_the_oracle(
    num_tokens: int, num_in: int, num_out: int, dtype: torch.dtype, has_bias: bool
) -> None:
    x = _randn(num_tokens, num_in, dtype=dtype)
    weight = (_randn(num_out, num_in, seed=1) / math.sqrt(num_in)).to(dtype)
    bias = _randn(num_out, dtype=dtype, seed=2) if has_bias else None
    fast, oracle = TorchOps(), ReferenceOps()
    expected = oracle.linear(x, oracle.pack_linear(weight, bias))
    got = fast.linear(x, fast.pack_linear(weight.clone(), bias))
    _assert_close(got, expected)


def test_linear_works_without_a_packed_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_linear, "can_pack", lambda weight: False)
    x, weight = _randn(3, 8), _randn(5, 8, seed=1)
    packed = TorchOps().pack_linear(weight)
    assert not packed.is_packed
    torch.testing.assert_close(TorchOps().linear(x, packed), x @ weight.T)


def test_a_nan_token_leaves_the_others_bit_equal() -> None:
    fast = TorchOps()
    packed = fast.pack_linear(_randn(96, 576, dtype=torch.bfloat16))
    x = _randn(9, 576, dtype=torch.bfloat16, seed=1)
    poisoned = x.clone()
    poisoned[4] = float("nan")
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    weight = torch.ones(576, dtype=torch.bfloat16)
    for op in (
        lambda t: fast.linear(t, packed),
        lambda t: fast.rms_norm(t, weight, 1e-5),
        fast.silu_and_mul,
    ):
        assert torch.equal(op(x)[others], op(poisoned)[others])
        assert op(poisoned)[4].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_logits_are_rounded_once_in_float32(dtype: torch.dtype, num_rows: int) -> None:
    x, weight = _randn(num_rows, 96, dtype=dtype), _randn(1000, 96, dtype=dtype)
    expected = x.double() @ weight.double().T
    for ops in (ReferenceOps(), TorchOps()):
        got = ops.logits(x, ops.pack_head(weight))
        assert got.dtype == torch.float32
        assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("size", [(1, 576), (33, 80), (5, 1)])
def test_layer_norms(dtype: torch.dtype, has_bias: bool, size: tuple[int, int]) -> None:
    x, residual = _randn(*size, dtype=dtype) + 3, _randn(*size, dtype=dtype, seed=1)
    weight = _randn(size[1], dtype=dtype, seed=2)
    bias = _randn(size[1], dtype=dtype, seed=3) if has_bias else None
    fast, oracle = TorchOps(), ReferenceOps()
    _assert_close(fast.layer_norm(x, weight, bias, 1e-5), oracle.layer_norm(x, weight, bias, 1e-5))
    expected = oracle.add_layer_norm(x, residual.clone(), weight, bias, 1e-5)
    got = fast.add_layer_norm(x, residual.clone(), weight, bias, 1e-5)
    for one, other in zip(got, expected, strict=True):
        _assert_close(one, other)
    assert torch.equal(fast.add(x, residual.clone()), x + residual)
    assert torch.equal(oracle.add(x, residual), x + residual)


def test_layer_norm_is_the_formula(ops: Ops) -> None:
    x, weight, bias = torch.tensor([[3.0, 5.0]]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 0.0), torch.tensor([[-0.5, 2.0]]))
    torch.testing.assert_close(ops.layer_norm(x, weight, None, 3.0), torch.tensor([[-0.5, 1.0]]))


def test_a_wide_weight_is_not_rounded(ops: Ops, recwarn: pytest.WarningsRecorder) -> None:
    """1 + weight, in float32, of a model whose activations are bfloat16 (Gemma)."""
    x, weight = _randn(3, 80, dtype=torch.bfloat16), 1 + _randn(80, seed=1) / 200
    exact = x.double() * torch.rsqrt(x.double().square().mean(dim=-1, keepdim=True))
    got = ops.rms_norm(x, weight, 0.0)
    assert torch.equal(got, (exact * weight.double()).bfloat16())
    assert not torch.equal(got, ops.rms_norm(x, weight.bfloat16(), 0.0))
    assert ops.layer_norm(x, weight, weight, 0.0).dtype == torch.bfloat16
    assert not recwarn.list


def test_gelu_is_the_formula(ops: Ops) -> None:
    numbers = [1.5, -2.0, 0.0, 4.0]
    x = torch.tensor([numbers])
    exact = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in numbers]
    near = [
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in numbers
    ]
    torch.testing.assert_close(ops.gelu(x.clone(), is_tanh=False), torch.tensor([exact]))
    torch.testing.assert_close(ops.gelu(x.clone(), is_tanh=True), torch.tensor([near]))


def test_angles_of_two_tables_are_kept_apart() -> None:
    """Layers of one step that turn by other angles (Gemma 3)."""
    fast, positions = TorchOps(), torch.tensor([8, 0, 3])
    tables = [_randn(9, 16), _randn(9, 16, seed=1)]
    q = _randn(3, 4, 16, seed=2)
    for cos_sin in (*tables, *tables):
        expected, _ = ReferenceOps().rotary(q, q, positions, cos_sin)
        torch.testing.assert_close(fast.rotary(q, q, positions, cos_sin)[0], expected)
