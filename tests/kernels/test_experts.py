"""Mixtures of experts: every op set against the oracle, the oracle against the formula, and who is chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from octavo.kernels.ops import Ops, QuantizedRows
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.select import select_ops
from octavo.kernels.torch_ops import TorchOps

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [  # experts, chosen, hidden, mlp, tokens
    (1, 1, 32, 32, 3),
    (5, 2, 33, 17, 1),
    (8, 8, 64, 48, 9),
    (64, 8, 96, 40, 50),
    (3, 1, 32, 32, 0),
    (7, 3, 1, 1, 5),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_experts(num_experts: int, hidden: int, mlp: int) -> tuple[Tensor, Tensor]:
    gate_up = draw(num_experts, 2 * mlp, hidden, seed=1) / hidden**0.5
    return gate_up, draw(num_experts, hidden, mlp, seed=2) / mlp**0.5


def assert_near(one: Tensor, other: Tensor, tolerance: float) -> None:
    """Nowhere further apart than a part of the largest number."""
    assert one.shape == other.shape
    assert one.isfinite().all()
    if other.numel():
        assert (one.float() - other.float()).abs().max() <= tolerance * other.float().abs().max()


@pytest.fixture(params=["reference", "torch", pytest.param("cpu", marks=pytest.mark.native)])
def any_ops(request: pytest.FixtureRequest) -> Ops:
    return select_ops(request.param, CPU)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["torch", pytest.param("cpu", marks=pytest.mark.native)])
def test_every_set_is_the_oracle(
    name: str, shape: tuple[int, int, int, int, int], renormalise: bool
) -> None:
    num_experts, top_k, hidden, mlp, num_tokens = shape
    ops, oracle = select_ops(name, CPU), ReferenceOps()
    x, logits = draw(num_tokens, hidden), draw(num_tokens, num_experts, seed=3)
    experts = draw_experts(num_experts, hidden, mlp)
    got, expected = (
        one.routed_experts(
            x,
            logits,
            one.pack_experts(*experts, num_experts),
            top_k=top_k,
            renormalise=renormalise,
        )
        for one in (ops, oracle)
    )
    assert got.dtype == torch.float32
    assert_near(got, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    x, logits = draw(11, 64).to(dtype), draw(11, 8, seed=3).to(dtype)
    gate_up, down = (one.to(dtype) for one in draw_experts(8, 64, 48))
    got, expected = (
        one.routed_experts(x, logits, one.pack_experts(gate_up, down, 8), top_k=2, renormalise=True)
        for one in (TorchOps(), ReferenceOps())
    )
    assert got.dtype == expected.dtype == dtype
    assert_near(got, expected, TOLERANCE[dtype])


@pytest.mark.native
def test_native_bfloat16() -> None:
    """Activations are float32 between products, and bfloat16 in them."""
    ops, oracle = select_ops("cpu", CPU), ReferenceOps()
    x, logits = draw(11, 64).bfloat16().float(), draw(11, 8, seed=3)
    gate_up, down = (one.bfloat16() for one in draw_experts(8, 64, 48))
    got, expected = (
        one.routed_experts(x, logits, one.pack_experts(gate_up, down, 8), top_k=3, renormalise=True)
        for one in (ops, oracle)
    )
    assert_near(got, expected, 1e-2)


def test_it_is_the_formula(any_ops: Ops) -> None:
    """Two of three experts, by hand: softmax over all, then each expert's gated result."""
    x = draw(1, 4)
    gate_up, down = draw_experts(3, 4, 6)
    logits = torch.tensor([[1.0, -1.0, 2.0]])
    packed = any_ops.pack_experts(gate_up, down, 3)
    weights = torch.exp(logits[0]) / torch.exp(logits[0]).sum()

    def expert(index: int) -> Tensor:
        gate, up = (gate_up[index] @ x[0]).chunk(2)
        return down[index] @ (functional.silu(gate) * up)

    expected = weights[2] * expert(2) + weights[0] * expert(0)
    got = any_ops.routed_experts(x, logits, packed, top_k=2, renormalise=False)
    assert_near(got[0], expected, 1e-6)
    got = any_ops.routed_experts(x, logits, packed, top_k=2, renormalise=True)
    assert_near(got[0], expected / (weights[2] + weights[0]), 1e-6)


def chosen_by(ops: Ops, logits: Tensor, top_k: int) -> list[set[int]]:
    """Who was chosen for each token: expert e's result is unit vector e, times something."""
    num_tokens, num_experts = logits.shape
    gate_up = torch.ones(num_experts, 2, num_experts)
    down = torch.eye(num_experts)[:, :, None]
    packed = ops.pack_experts(gate_up, down, num_experts)
    x = torch.ones(num_tokens, num_experts)
    out = ops.routed_experts(x, logits, packed, top_k=top_k, renormalise=False)
    return [set(row.nonzero().flatten().tolist()) for row in out]


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_the_largest_are_chosen_and_of_equals_the_first(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 20))
    top_k = data.draw(st.integers(1, num_experts))
    few = st.sampled_from([-1.5, 0.0, 0.25, 2.0])
    row = st.lists(few, min_size=num_experts, max_size=num_experts)
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    expected = [set(sorted(range(num_experts), key=lambda e: (-r[e], e))[:top_k]) for r in rows]
    for name in ("reference", "torch", "cpu"):
        assert chosen_by(select_ops(name, CPU), torch.tensor(rows), top_k) == expected, name


@pytest.mark.parametrize("scale", [1e-3, 80.0, 1e4])
def test_logits_of_any_size(scale: float, any_ops: Ops) -> None:
    x, logits = draw(6, 32), draw(6, 8, seed=3) * scale
    experts = draw_experts(8, 32, 32)
    for renormalise in (False, True):
        got, expected = (
            one.routed_experts(
                x, logits, one.pack_experts(*experts, 8), top_k=3, renormalise=renormalise
            )
            for one in (any_ops, ReferenceOps())
        )
        assert_near(got, expected, 1e-5)


@pytest.mark.parametrize("num_heads", [1, 3])
def test_clamp(num_heads: int, any_ops: Ops) -> None:
    """Of heads that are part of wider rows; NaN stays."""
    wide = draw(5, num_heads + 2, 33)
    x = wide[:, 1 : num_heads + 1]
    x[2, 0, 7] = torch.nan
    x[3, 0, 32] = torch.inf
    before, expected = wide.clone(), x.clone().clamp(-0.7, 0.7)
    got = any_ops.clamp(x, 0.7)
    assert torch.equal(got.nan_to_num(9), expected.nan_to_num(9))
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, -1], before[:, -1])


@pytest.mark.parametrize("ops_class", [TorchOps, ReferenceOps])
def test_blocks_are_refused_where_products_take_numbers(ops_class: type[Ops]) -> None:
    blocks = QuantizedRows(torch.zeros(64, 34, dtype=torch.uint8), "Q8_0")
    with pytest.raises(TypeError, match="do not take Q8_0"):
        ops_class().pack_experts([blocks], [blocks], 1)
