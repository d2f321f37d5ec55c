"""Norm, rotary and store in one launch, against their twins, with poison wherever nothing may be written."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import triton_kv_store
from octavo.kernels.ops import KVScales, LayerKVCache
from octavo.kernels.reference import ReferenceOps

ORACLE = ReferenceOps()
FP8 = torch.float8_e4m3fn
POISON = 77.0
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


class Case(NamedTuple):
    """Tokens on their way into a cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    cos_sin: Tensor
    slots: Tensor
    norms: tuple[Tensor, Tensor]
    shape: tuple[int, ...]  # of the cache
    cache_dtype: torch.dtype

    def cache(self) -> LayerKVCache:
        key = torch.full(self.shape, POISON).to(self.cache_dtype)
        return LayerKVCache(key, key.clone())

    def rows(self) -> LayerKVCache:
        """A cache with a block of its own for each token."""
        row = torch.zeros((len(self.q), 1, *self.shape[2:])).to(self.cache_dtype)
        return LayerKVCache(row, row.clone())


def _case(
    num_tokens: int = 5,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    rotary_dim: int | None = None,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """q, k and v are views of one product, with NaN after each token's heads; every third slot is -1."""
    random = torch.Generator().manual_seed(seed)
    num_q, num_kv = heads
    product = torch.randn((num_tokens, num_q + 2 * num_kv, head_dim), generator=random) * 3
    wide = torch.full((num_tokens, num_q + 2 * num_kv + 1, head_dim), float("nan"), dtype=dtype)
    wide[:, :-1] = product.to(dtype)
    angles = torch.randn((40, (rotary_dim or head_dim) // 2), generator=random) * 3
    num_blocks = -(-num_tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size, generator=random)[:num_tokens]
    slots[::3] = -1
    norms = torch.rand((2, head_dim), generator=random).to(dtype) + 0.5
    return Case(
        wide[:, :num_q],
        wide[:, num_q : num_q + num_kv],
        wide[:, num_q + num_kv : -1],
        torch.randint(0, 40, (num_tokens,), generator=random),
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        slots,
        (norms[0], norms[1]),
        (num_blocks, block_size, num_kv, head_dim),
        cache_dtype or dtype,
    )


def _check(case: Case, *, has_norm: bool = False, kv_scales: KVScales | None = None) -> None:
    norms: dict[str, Any] = {}
    if has_norm:
        norms = {"q_norm": case.norms[0], "k_norm": case.norms[1], "eps": 1e-6}
    cache, expected = case.cache(), case.rows()
    step = (case.q, case.k, case.v, case.positions, case.cos_sin)
    q = triton_kv_store.rotary_store(*step, cache, case.slots, **norms, kv_scales=kv_scales)
    in_order = torch.arange(len(case.q))
    wanted = ORACLE.rotary_store(*step, expected, in_order, **norms, kv_scales=kv_scales)
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(q, wanted, atol=tolerance * 3, rtol=tolerance)
    _check_stored(case, cache, expected, 0.13 if case.cache_dtype == FP8 else tolerance)


def _check_stored(
    case: Case, cache: LayerKVCache, expected: LayerKVCache, tolerance: float
) -> None:
    """Token i is in its slot as it is in row i of ``expected``; every other slot is poison still."""
    is_stored = case.slots >= 0
    others = torch.ones(case.shape[0] * case.shape[1], dtype=torch.bool)
    others[case.slots[is_stored]] = False
    poison = torch.tensor(POISON).to(case.cache_dtype).float()
    for got, right in zip(cache, expected, strict=True):
        rows = got.float().flatten(0, 1)
        torch.testing.assert_close(
            rows[case.slots[is_stored]],
            right.float()[:, 0][is_stored],
            atol=3 * TOLERANCE[case.q.dtype],
            rtol=tolerance,
        )
        assert (rows[others] == poison).all()


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 32), (128, 128), (256, 64)]
)
def test_rotary_store(dtype: torch.dtype, has_norm: bool, head_dim: int, rotary_dim: int) -> None:
    _check(_case(4, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype), has_norm=has_norm)


@pytest.mark.smoke
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (32, 8), (16, 1), (5, 5)])
def test_heads(heads: tuple[int, int]) -> None:
    _check(_case(2, heads=heads), has_norm=True)


@given(
    num_tokens=st.integers(0, 6),
    heads=st.sampled_from([(1, 1), (6, 2), (3, 3)]),
    head_dim=st.integers(1, 20).map(lambda half: 2 * half),
    block_size=st.sampled_from([1, 3, 16]),
    has_norm=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=30)
def test_any_shape(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    has_norm: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    rotary_dim = 2 * data.draw(st.integers(1, head_dim // 2))
    case = _case(num_tokens, heads, head_dim, rotary_dim, block_size, seed=seed)
    _check(case, has_norm=has_norm)


@pytest.mark.smoke
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_has_its_own_type(cache_dtype: torch.dtype) -> None:
    case = _case(4, dtype=torch.float32, cache_dtype=cache_dtype)
    cache, expected = case.cache(), case.rows()
    triton_kv_store.store_kv(case.k, case.v, cache, case.slots)
    ORACLE.store_kv(case.k, case.v, expected, torch.arange(len(case.k)))
    _check_stored(case, cache, expected, 8e-3)


@pytest.mark.smoke
@pytest.mark.parametrize("scales", [None, KVScales(0.25, 2.0), KVScales(0.013, 0.3)])
def test_scales(scales: KVScales | None) -> None:
    _check(_case(4), kv_scales=scales)
    _check(_case(4, cache_dtype=FP8), kv_scales=scales)
    _check(_case(4, dtype=torch.bfloat16, cache_dtype=FP8), has_norm=True, kv_scales=scales)


@pytest.mark.smoke
def test_fp8_codes_are_those_of_torch() -> None:
    """Every code, every middle between two, what overflows, and NaN: to the nearest, ties to even."""
    exact = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (exact[1:] + exact[:-1]) / 2
    near = torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, exact[1:])
    others = torch.tensor([449.0, 464.0, 465.0, 1e30, float("inf"), 1e-30, float("nan")])
    values = torch.cat((exact, middles, *near, others))
    values = torch.cat((values, -values))
    head_dim = 2 * (-(-len(values) // 8))
    values = torch.nn.functional.pad(values, (0, 4 * head_dim - len(values))).view(1, 4, head_dim)
    cache = LayerKVCache(*(torch.zeros(1, 1, 4, head_dim).to(FP8) for _ in range(2)))
    triton_kv_store.store_kv(values, values, cache, torch.tensor([0]))
    expected = values.clamp(-448, 448).to(FP8)
    numbers = ~expected.float().isnan()
    for tensor in cache:
        assert torch.equal(
            tensor[0].view(torch.uint8)[numbers], expected.view(torch.uint8)[numbers]
        )
        assert tensor[0].float()[~numbers].isnan().all()


@pytest.mark.smoke
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 32), (6, 2)])
def test_rotary_alone(head_dim: int, rotary_dim: int) -> None:
    case = _case(3, (5, 2), head_dim, rotary_dim)
    got = triton_kv_store.rotary(case.q, case.k, case.positions, case.cos_sin)
    expected = ORACLE.rotary(case.q, case.k, case.positions, case.cos_sin)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.smoke
def test_slots_past_two_gigabytes() -> None:
    """The cache is virtual memory: only the last block is touched."""
    from octavo.kernels.kv_store import untouched_zeros

    shape = ((1 << 31) // (16 * 2 * 64) + 2, 16, 2, 64)  # of one byte each
    cache = LayerKVCache(
        untouched_zeros(shape, torch.uint8).view(FP8), untouched_zeros(shape, torch.uint8).view(FP8)
    )
    last = shape[0] * 16 - 1
    k = torch.ones(1, 2, 64)
    triton_kv_store.store_kv(k, 2 * k, cache, torch.tensor([last]))
    assert torch.equal(cache.key[-1, -1].float(), k[0])
    assert torch.equal(cache.value[-1, -1].float(), 2 * k[0])


@pytest.mark.smoke
def test_what_cannot_be_is_refused() -> None:
    case = _case()
    step = (case.q, case.k, case.v, case.positions, case.cos_sin, case.cache(), case.slots)
    with pytest.raises(ValueError, match="normed together"):
        triton_kv_store.rotary_store(*step, q_norm=case.norms[0])
    with pytest.raises(ValueError, match="side by side"):
        triton_kv_store.store_kv(
            case.k.transpose(1, 2).contiguous().transpose(1, 2), case.v, case.cache(), case.slots
        )
