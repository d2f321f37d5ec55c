"""Routed experts against their twins: any crowd, odd sizes, poison in everything that is not theirs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import torch_experts, triton_experts
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.triton_experts import SortedRows, TritonExperts, TritonMixture
from octavo.kernels.triton_experts_table import FEW, MANY, Tile
from octavo.kernels.triton_gpu import ARCHITECTURES, Gpu

ORACLE = ReferenceOps()
# The interpreter cuts to bfloat16 where a GPU rounds: a unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SMALL = Tile(16, 32, 32, 4, 2)
MIXTURE = TritonMixture(Gpu(ARCHITECTURES["sm_90"], 132), {FEW: SMALL, MANY: SMALL})


def _randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _experts(
    count: int, hidden: int, mlp: int, dtype: torch.dtype = torch.float32
) -> TritonExperts:
    return TritonExperts(
        (_randn(count, 2 * mlp, hidden, seed=1) / hidden**0.5).to(dtype),
        (_randn(count, hidden, mlp, seed=2) / mlp**0.5).to(dtype),
    )


def _assert_near(one: Tensor, other: Tensor, tolerance: float) -> None:
    """Nowhere further apart than a part of the largest number."""
    assert one.dtype == other.dtype
    assert one.isfinite().all()
    assert (one.float() - other.float()).abs().max() <= tolerance * other.float().abs().max()


def _check(
    x: Tensor, logits: Tensor, experts: TritonExperts, top_k: int, renormalise: bool
) -> None:
    packed = ORACLE.pack_experts(*experts, len(experts.down))
    expected = ORACLE.routed_experts(x, logits, packed, top_k=top_k, renormalise=renormalise)
    _assert_near(MIXTURE(x, logits, experts, top_k, renormalise), expected, TOLERANCE[x.dtype])


@pytest.mark.smoke
def test_first_look() -> None:
    _check(_randn(5, 48), _randn(5, 4, seed=3), _experts(4, 48, 40), 2, True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (3, 3), (8, 2), (40, 8)])
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_mixtures(dtype: torch.dtype, count: int, top_k: int, num_tokens: int) -> None:
    x, logits = _randn(num_tokens, 40, dtype=dtype), _randn(num_tokens, count, dtype=dtype, seed=3)
    _check(x, logits, _experts(count, 40, 24, dtype), top_k, renormalise=count == 8)


@pytest.mark.parametrize(("hidden", "mlp"), [(1, 1), (33, 7), (64, 32), (100, 65)])
def test_odd_sizes(hidden: int, mlp: int) -> None:
    _check(_randn(9, hidden), _randn(9, 5, seed=3), _experts(5, hidden, mlp), 2, False)


def test_all_go_to_one_expert() -> None:
    logits = torch.zeros(50, 6)
    logits[:, 4] = 9.0
    _check(_randn(50, 32), logits, _experts(6, 32, 16), 1, True)


def test_rows_that_are_apart() -> None:
    wide, logits = _randn(7, 90), _randn(7, 20, seed=3)
    wide[:, 64:] = logits[:, 6:] = torch.nan
    _check(wide[:, :64], logits[:, :6], _experts(6, 64, 32), 2, False)


def test_warming_up_tries_both_tiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = SMALL._replace(block_n=16), SMALL
    mixture = TritonMixture(Gpu(ARCHITECTURES["sm_90"], 132), {FEW: few, MANY: many}, warms_up=True)
    tried: list[Tile] = []
    compute = triton_experts.compute

    def note(x: Tensor, experts: TritonExperts, rows: SortedRows, tile: Tile) -> Tensor:
        tried.append(tile)
        return compute(x, experts, rows, tile)

    monkeypatch.setattr(triton_experts, "compute", note)
    x, logits, experts = _randn(5, 32), _randn(5, 4, seed=3), _experts(4, 32, 16)
    first, second = (mixture(x, logits, experts, 2, True) for _ in range(2))
    assert tried == [many, few, few]
    assert torch.equal(first, second)


def test_no_tokens() -> None:
    assert MIXTURE(_randn(0, 32), _randn(0, 4), _experts(4, 32, 16), 2, True).shape == (0, 32)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x, logits, experts = _randn(20, 32), _randn(20, 6, seed=3), _experts(6, 32, 16)
    clean = MIXTURE(x, logits, experts, 3, False)
    x[7], logits[9], logits[11, 4] = torch.nan, torch.nan, torch.inf
    out = MIXTURE(x, logits, experts, 3, False)
    assert not out[[7, 9, 11]].isfinite().any()
    others = [row for row in range(20) if row not in (7, 9, 11)]
    assert torch.equal(out[others], clean[others])


@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_routing_is_its_twin(data: st.DataObject) -> None:
    """Ties, too: the lowest ids."""
    num_experts = data.draw(st.integers(1, 20))
    top_k = data.draw(st.integers(1, num_experts))
    few = st.sampled_from([-1.5, 0.0, 0.25, 2.0, 60.0])
    row = st.lists(few, min_size=num_experts, max_size=num_experts)
    logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    renormalise = data.draw(st.booleans())
    ids, weights = triton_experts.route(logits, top_k, renormalise)
    expected_ids, expected_weights = torch_experts.route(logits, top_k, renormalise)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-7, rtol=1e-5)


@given(
    num_experts=st.integers(1, 12),
    num_tokens=st.integers(1, 40),
    block_m=st.integers(1, 8),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=50)
def test_the_grid_has_room_for_every_block(
    num_experts: int, num_tokens: int, block_m: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed % 1000)
    ids = torch.randint(0, num_experts, (num_tokens, 1), generator=random, dtype=torch.int32)
    starts, pairs = triton_experts.sort_pairs(ids, num_experts)
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]
    assert pairs.tolist() == sorted(range(num_tokens), key=lambda row: (int(ids[row]), row))
    needed = sum(-(-count // block_m) for count in counts.tolist())
    assert needed <= triton_experts.max_blocks(num_tokens, num_experts, block_m)


def test_what_does_not_fit_is_refused() -> None:
    x, logits, experts = _randn(3, 32), _randn(3, 4), _experts(4, 32, 16)
    with pytest.raises(
        ValueError, match=r"do not multiply torch\.float32 by experts of torch\.float16"
    ):
        MIXTURE(x, logits, _experts(4, 32, 16, torch.float16), 2, True)
    for bad in (
        (x[:, :31], logits, experts, 2),
        (x, logits[:2], experts, 2),
        (x, logits[:, :3], experts, 2),
        (x, logits, experts._replace(down=experts.down[:, :, :15]), 2),
        (x, logits, experts, 5),
        (x, logits, experts, 0),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            MIXTURE(*bad, True)
