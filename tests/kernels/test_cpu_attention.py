"""Native attention and KV stores: against a dense formula, the oracle, and themselves in other company."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import cpu_build, cpu_structs
from octavo.kernels.ops import AttentionMetadata, KVCacheSpec, LayerKVCache

pytestmark = pytest.mark.native

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]
BATCHES = {
    "one token": [(1, 1)],
    "one decode": [(37, 1)],
    "decodes of many lengths": [(5, 1), (1, 1), (33, 1), (17, 1), (16, 1), (65, 1)],
    "whole prompts": [(7, 7), (20, 20), (20, 20), (2, 2)],
    "later chunks": [(9, 3), (40, 5), (40, 5), (33, 32)],
    "prefill and decode": [(12, 1), (9, 9), (33, 1), (12, 4), (1, 1), (130, 1)],
}


class NativeOps:
    """The native calls with the signatures of ``Ops``; activations are float32."""

    def __init__(self, library: ctypes.CDLL, num_threads: int = 2) -> None:
        self._library = library
        self._num_threads = num_threads

    def allocate_kv_cache(self, spec: KVCacheSpec, device: torch.device) -> LayerKVCache:
        size, dim, per_word = spec.block_size, spec.head_dim, 4 // spec.dtype.itemsize
        heads = (spec.num_blocks, spec.num_kv_heads)
        key = (*heads, -(-dim // per_word), size, per_word)
        value = (*heads, -(-size // per_word), dim, per_word)
        return LayerKVCache(_untouched_zeros(key, spec.dtype), _untouched_zeros(value, spec.dtype))

    def store_kv(self, k: Tensor, v: Tensor, cache: LayerKVCache, slot_mapping: Tensor) -> None:
        num_tokens = torch.tensor(len(slot_mapping))
        k, v = k.float(), v.float()
        assert k.stride() == v.stride()
        args = cpu_structs.StoreKVArgs(
            num_tokens=num_tokens.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            token_stride=k.stride(0),
            head_stride=k.stride(1),
            slots=slot_mapping.data_ptr(),
            **_shape(cache),
        )
        cpu_structs.run(self._library, [args], self._num_threads)

    def attention(
        self,
        q: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        q = q.float()
        out = torch.full_like(q, float("nan"))
        cells = torch.tensor([len(metadata.seq_lens), metadata.block_tables.stride(0)])
        args = cpu_structs.AttentionArgs(
            num_rows=cells.data_ptr(),
            query_start_loc=metadata.query_start_loc.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_tables=metadata.block_tables.data_ptr(),
            table_stride=cells[1:].data_ptr(),
            q=q.data_ptr(),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            num_q_heads=q.shape[1],
            scale=scale,
            window=window or 0,
            soft_cap=soft_cap or 0.0,
            out=out.data_ptr(),
            out_stride=out.stride(0),
            **_shape(cache),
        )
        cpu_structs.run(self._library, [args], self._num_threads)
        return out


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _shape(cache: LayerKVCache) -> dict[str, int]:
    return {
        "key": cache.key.data_ptr(),
        "value": cache.value.data_ptr(),
        "dtype": DTYPES.index(cache.key.dtype),
        "block_size": cache.key.shape[3],
        "num_kv_heads": cache.key.shape[1],
        "head_dim": cache.value.shape[3],
    }


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    native = cpu_build.load_library()
    assert native.library is not None, native.detail
    return cpu_structs.declare(native.library)


@pytest.fixture(scope="module")
def native(library: ctypes.CDLL) -> NativeOps:
    return NativeOps(library)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_dense_attention(
    native: Any, make_batch: Any, make_shape: Any, rows: Any, block_size: int, dtype: torch.dtype
) -> None:
    batch = make_batch(rows, make_shape(block_size=block_size, dtype=dtype))
    out = batch.run(native).double().numpy()
    np.testing.assert_allclose(out, batch.dense(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1), (14, 2), (40, 1)])
@pytest.mark.parametrize("head_dim", [1, 7, 8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads(
    native: Any,
    make_batch: Any,
    make_shape: Any,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    shape = make_shape(*heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    batch = make_batch([(17, 1), (33, 1), (19, 19), (30, 4), (100, 1)], shape)
    scale = head_dim**-0.5
    out = batch.run(native, scale=scale).double().numpy()
    np.testing.assert_allclose(out, batch.dense(scale=scale), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("block_size", "head_dim"), [(4, 16), (16, 64), (32, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_window_and_soft_cap(
    native: Any,
    make_batch: Any,
    make_shape: Any,
    rows: Any,
    window: int,
    soft_cap: float | None,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    shape = make_shape(head_dim=head_dim, block_size=block_size, dtype=dtype)
    batch = make_batch(rows, shape)
    options = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    out = batch.run(native, **options).double().numpy()
    expected = batch.dense(**options)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_of_mixed_lengths(
    native: Any, make_batch: Any, make_shape: Any, dtype: torch.dtype
) -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 60)
    rows = [(int(n), 1) for n in lengths[:50]] + [(int(n), int(n) // 3 + 1) for n in lengths[50:]]
    batch = make_batch(rows, make_shape(9, 3, head_dim=64, block_size=16, dtype=dtype))
    out = batch.run(native, scale=0.125).double().numpy()
    np.testing.assert_allclose(out, batch.dense(scale=0.125), atol=TOLERANCE[dtype])


def test_large_scores_do_not_overflow(native: Any, make_batch: Any, make_shape: Any) -> None:
    batch = make_batch([(40, 3), (40, 1)], make_shape())
    out = batch.run(native, scale=300.0).double().numpy()
    np.testing.assert_allclose(out, batch.dense(scale=300.0), atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_prefix_hit_reads_what_others_stored(
    native: Any, make_batch: Any, make_shape: Any, block_size: int, dtype: torch.dtype
) -> None:
    shape = make_shape(block_size=block_size, dtype=dtype)
    batch = make_batch([(32, 1), (12, 1), (24, 2)], shape, shared=[0, 2])
    before = batch.filled_cache(native)
    after = LayerKVCache(before.key.clone(), before.value.clone())
    native.store_kv(torch.ones(1, 2, 16), torch.ones(1, 2, 16), after, torch.full((1,), -1))
    assert torch.equal(before.key.nan_to_num(9.0), after.key.nan_to_num(9.0))
    assert torch.equal(before.value.nan_to_num(9.0), after.value.nan_to_num(9.0))
    np.testing.assert_allclose(
        batch.run(native).double().numpy(), batch.dense(), atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(4, 6), (5, 7)])
def test_the_layout_is_what_it_says(
    native: Any, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Keys ``[heads][dim / per][token][per]``, values ``[heads][token / per][dim][per]``."""
    spec = KVCacheSpec(2, block_size, 2, head_dim, dtype)
    cache = native.allocate_kv_cache(spec, torch.device("cpu"))
    cache.key.fill_(7.0)
    per_word = 4 // dtype.itemsize
    k, v = torch.randn(block_size, 2, head_dim), torch.randn(block_size, 2, head_dim)
    native.store_kv(k, v, cache, torch.arange(block_size) + block_size)
    for token in range(block_size):
        key = cache.key[1, :, :, token].reshape(2, -1)
        assert torch.equal(key[:, :head_dim], k[token].to(dtype))
        assert not key[:, head_dim:].any()
        step, half = divmod(token, per_word)
        assert torch.equal(cache.value[1, :, step, :, half], v[token].to(dtype))
    assert cache.key[0].eq(7.0).all()


def test_nan_and_infinity_are_stored_as_they_are(native: Any) -> None:
    cache = native.allocate_kv_cache(KVCacheSpec(1, 2, 1, 2, torch.bfloat16), torch.device("cpu"))
    values = torch.tensor([[[float("nan"), float("inf")]], [[float("-inf"), 3.4e38]]])
    native.store_kv(values, values, cache, torch.arange(2))
    expected = values.bfloat16()[:, 0]
    torch.testing.assert_close(cache.key[0, 0, 0], expected, equal_nan=True)
    torch.testing.assert_close(cache.value[0, 0, 0].T, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_arguments(
    native: Any, make_batch: Any, make_shape: Any, dtype: torch.dtype
) -> None:
    """Queries, keys and values as they lie in one product of a fused projection."""
    batch = make_batch([(9, 9), (4, 4)], make_shape(dtype=dtype))
    k, v = torch.cat(batch.keys).float(), torch.cat(batch.values).float()
    fused = torch.cat([batch.q.float(), k, v], dim=1)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    cache, metadata = batch.filled_cache(native), batch.metadata()
    native.store_kv(k, v, cache, metadata.slot_mapping)
    out = native.attention(q, cache, metadata, scale=0.25)
    assert torch.equal(out, batch.run(native))


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    return {
        "lengths": draw(st.lists(st.integers(1, 90), min_size=1, max_size=5)),
        "block_size": draw(st.sampled_from([1, 2, 5, 8, 16, 17, 32, 40, 64])),
        "heads": (num_kv_heads * group, num_kv_heads),
        "head_dim": draw(st.sampled_from([1, 8, 18, 64, 80, 96, 128])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "window": draw(st.one_of(st.none(), st.integers(1, 50))),
        "soft_cap": draw(st.sampled_from([None, 3.0])),
        "seed": draw(st.integers(0, 1000)),
        "draw": draw(st.randoms(use_true_random=False)),
    }


@given(case=_cases())
@settings(max_examples=80, deadline=None)
def test_a_token_is_bit_equal_in_any_company(
    library: ctypes.CDLL, make_batch: Any, make_shape: Any, case: dict[str, Any]
) -> None:
    """All at once from NaN-filled blocks, against chunks of random sizes in a random mix of rows,
    other blocks and another number of threads."""
    shape = make_shape(
        *case["heads"],
        head_dim=case["head_dim"],
        block_size=case["block_size"],
        dtype=case["dtype"],
    )
    options = {"scale": 0.3, "window": case["window"], "soft_cap": case["soft_cap"]}
    batch = make_batch([(n, n) for n in case["lengths"]], shape, seed=case["seed"])
    whole = batch.run(NativeOps(library, num_threads=2), **options)
    np.testing.assert_allclose(
        whole.double().numpy(), batch.dense(**options), atol=TOLERANCE[shape.dtype] * 2
    )
    expected = dict(enumerate(whole.split(case["lengths"])))

    one_thread = NativeOps(library, num_threads=1)
    ids = list(range(batch.num_blocks))
    case["draw"].shuffle(ids)
    batch.tables = [[ids[block] for block in table] for table in batch.tables]
    cache = batch.filled_cache(one_thread)
    done = [0] * len(case["lengths"])
    while any(done[row] < n for row, n in enumerate(case["lengths"])):
        left = [row for row, n in enumerate(case["lengths"]) if done[row] < n]
        rows = case["draw"].sample(left, case["draw"].randint(1, len(left)))
        counts = [case["draw"].randint(1, case["lengths"][row] - done[row]) for row in rows]
        part = make_batch([(done[r] + c, c) for r, c in zip(rows, counts, strict=True)], shape)
        part.tables = [batch.tables[row] for row in rows]
        metadata = part.metadata()
        spans = [slice(done[r], done[r] + c) for r, c in zip(rows, counts, strict=True)]
        q, k, v = (
            torch.cat([values[row][span] for row, span in zip(rows, spans, strict=True)])
            for values in (batch.queries, batch.keys, batch.values)
        )
        one_thread.store_kv(k, v, cache, metadata.slot_mapping)
        out = one_thread.attention(q, cache, metadata, **options)
        starts = metadata.query_start_loc.tolist()
        for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
            assert torch.equal(out[starts[i] : starts[i + 1]], expected[row][span])
            done[row] = span.stop


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "head_dim"), [(1, 16), (5, 16), (16, 16), (16, 64), (32, 96)]
)
@pytest.mark.parametrize("window", [None, 7])
def test_nan_of_later_tokens_and_of_other_rows_stays_with_them(
    native: Any,
    make_batch: Any,
    make_shape: Any,
    block_size: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    rows = [(21, 21), (21, 1), (40, 9)]
    shape = make_shape(head_dim=head_dim, block_size=block_size, dtype=dtype)
    healthy, poisoned = (make_batch(rows, shape) for _ in range(2))
    poisoned.keys[0][13] = poisoned.values[0][13] = float("nan")
    poisoned.values[1][20] = float("inf")
    poisoned.queries[2][4] = float("nan")
    expected = healthy.run(native, window=window).split([21, 1, 9])
    out = poisoned.run(native, window=window).split([21, 1, 9])
    assert torch.equal(out[0][:13], expected[0][:13])
    assert out[0][13:20].isnan().all()
    if window is not None:
        assert torch.equal(out[0][20:], expected[0][20:])
    assert not out[1].isfinite().any()
    untouched = [i for i in range(9) if i != 4]
    assert torch.equal(out[2][untouched], expected[2][untouched])
    assert out[2][4].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_id_beyond_two_gibibytes(
    native: Any, make_batch: Any, make_shape: Any, dtype: torch.dtype
) -> None:
    """Offsets into the cache must not be computed in 32 bits."""
    num_blocks = (9 << 30) // (2 * 16 * 8 * 64 * dtype.itemsize)
    cache = native.allocate_kv_cache(KVCacheSpec(num_blocks, 16, 8, 64, dtype), torch.device("cpu"))
    batch = make_batch([(3, 3)], make_shape(8, 8, head_dim=64, block_size=16, dtype=dtype))
    batch.tables = [[num_blocks - 1]]
    metadata = batch.metadata()
    native.store_kv(batch.keys[0], batch.values[0], cache, metadata.slot_mapping)
    out = native.attention(batch.q, cache, metadata, scale=0.25).double().numpy()
    np.testing.assert_allclose(out, batch.dense(), atol=TOLERANCE[dtype])
