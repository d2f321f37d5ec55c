"""Paged attention and its cache: the oracle against a dense formula, the fast set against both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import attention_plan
from octavo.kernels.attention_plan import plan_attention
from octavo.kernels.kv_store import neighbours
from octavo.kernels.ops import KVCacheSpec, LayerKVCache, Ops
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_ops import TorchOps

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
BATCHES = {
    "one token": [(1, 1)],
    "one decode": [(37, 1)],
    "decodes of many lengths": [(5, 1), (1, 1), (33, 1), (17, 1), (16, 1)],
    "whole prompts": [(7, 7), (20, 20), (20, 20), (2, 2)],
    "later chunks": [(9, 3), (40, 5), (40, 5), (33, 32)],
    "prefill and decode": [(12, 1), (9, 9), (33, 1), (12, 4), (1, 1)],
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_dense_attention(
    ops: Ops, make_batch: Any, make_shape: Any, rows: Any, block_size: int, dtype: torch.dtype
) -> None:
    batch = make_batch(rows, make_shape(block_size=block_size, dtype=dtype))
    out = batch.run(ops).double().numpy()
    np.testing.assert_allclose(out, batch.dense(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96])
def test_heads(
    ops: Ops, make_batch: Any, make_shape: Any, heads: tuple[int, int], head_dim: int
) -> None:
    shape = make_shape(*heads, head_dim=head_dim, block_size=16)
    batch = make_batch([(17, 1), (33, 1), (19, 19), (30, 4)], shape)
    np.testing.assert_allclose(batch.run(ops).double().numpy(), batch.dense(), atol=2e-5)


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_window_and_soft_cap(
    ops: Ops, make_batch: Any, make_shape: Any, rows: Any, window: int, soft_cap: float | None
) -> None:
    batch = make_batch(rows, make_shape())
    out = batch.run(ops, window=window, soft_cap=soft_cap).double().numpy()
    np.testing.assert_allclose(out, batch.dense(window=window, soft_cap=soft_cap), atol=2e-5)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_soft_cap_without_window(ops: Ops, make_batch: Any, make_shape: Any, rows: Any) -> None:
    batch = make_batch(rows, make_shape())
    out = batch.run(ops, soft_cap=1.5).double().numpy()
    np.testing.assert_allclose(out, batch.dense(soft_cap=1.5), atol=2e-5)


def test_prefix_hit_reads_what_others_stored(ops: Ops, make_batch: Any, make_shape: Any) -> None:
    batch = make_batch([(32, 1), (12, 1), (24, 2)], make_shape(block_size=8), shared=[0, 2])
    before = batch.filled_cache(ops)
    after = LayerKVCache(before.key.clone(), before.value.clone())
    slots = torch.full((1,), -1)
    ops.store_kv(torch.ones(1, 2, 16), torch.ones(1, 2, 16), after, slots)
    assert torch.equal(before.key.nan_to_num(9.0), after.key.nan_to_num(9.0))
    np.testing.assert_allclose(batch.run(ops).double().numpy(), batch.dense(), atol=2e-5)


@st.composite
def _rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=6))
    return [(n, draw(st.one_of(st.just(1), st.integers(1, n)))) for n in lengths]


@given(
    rows=_rows(),
    block_size=st.sampled_from([1, 2, 7, 16, 32]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_any_batch_equals_the_oracle(
    make_batch: Any,
    make_shape: Any,
    rows: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    seed: int,
) -> None:
    batch = make_batch(rows, make_shape(block_size=block_size), seed=seed)
    expected = batch.run(ReferenceOps(), window=window)
    torch.testing.assert_close(batch.run(TorchOps(), window=window), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_a_nan_row_leaves_its_neighbours_bit_equal(
    ops: Ops, make_batch: Any, make_shape: Any, rows: Any
) -> None:
    rows = [*rows, (21, 3), (21, 1)]
    healthy, poisoned = (make_batch(rows, make_shape()) for _ in range(2))
    for row in (len(rows) - 1, len(rows) - 2):
        poisoned.queries[row][:] = float("nan")
        poisoned.keys[row][-1] = float("nan")
        poisoned.values[row][-1] = float("nan")
    num_healthy = sum(count for _, count in rows[:-2])
    expected, out = healthy.run(ops), poisoned.run(ops)
    assert torch.equal(out[:num_healthy], expected[:num_healthy])
    assert out[num_healthy:].isnan().any()


def test_a_reused_block_forgets_its_last_owner(ops: Ops) -> None:
    """NaN of a row that has gone must not reach the block's next owner through masked slots."""
    spec = KVCacheSpec(2, 4, 1, 8, torch.float32)
    cache = ops.allocate_kv_cache(spec, torch.device("cpu"))
    bad = torch.full((4, 1, 8), float("nan"))
    ops.store_kv(bad, bad, cache, torch.arange(4))
    good = torch.ones(1, 1, 8)
    ops.store_kv(good, good, cache, torch.tensor([0]))
    assert torch.equal(cache.key[0, 0], good[0])
    assert torch.equal(cache.value[0, 1:], torch.zeros(3, 1, 8))


def test_store_casts_to_the_cache(ops: Ops) -> None:
    spec = KVCacheSpec(2, 2, 1, 2, torch.bfloat16)
    cache = ops.allocate_kv_cache(spec, torch.device("cpu"))
    k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    ops.store_kv(k, -k, cache, torch.tensor([3, -1]))
    assert cache.key[1, 1].tolist() == [[1.0, 2.0]]
    assert cache.value[1, 1].tolist() == [[-1.0, -2.0]]
    assert cache.key[0].abs().sum() == 0


def test_copy_blocks_copies_every_layer(ops: Ops) -> None:
    spec = KVCacheSpec(5, 2, 1, 2, torch.float32)
    caches = [ops.allocate_kv_cache(spec, torch.device("cpu")) for _ in range(2)]
    for cache in caches:
        for tensor in cache:
            tensor.normal_()
    before = [[tensor.clone() for tensor in cache] for cache in caches]
    ops.copy_blocks(caches, torch.tensor([0, 3]), torch.tensor([4, 1]))
    for cache, old in zip(caches, before, strict=True):
        for tensor, was in zip(cache, old, strict=True):
            assert torch.equal(tensor[[4, 1]], was[[0, 3]])
            assert torch.equal(tensor[[0, 2, 3]], was[[0, 2, 3]])


def test_swap_blocks_copies_between_two_memories(ops: Ops) -> None:
    caches = []
    for num_blocks in (5, 3):
        spec = KVCacheSpec(num_blocks, 2, 1, 2, torch.bfloat16)
        caches.append([ops.allocate_kv_cache(spec, torch.device("cpu")) for _ in range(2)])
        for cache in caches[-1]:
            for tensor in cache:
                tensor.normal_()
    source, target = caches
    before = [[tensor.clone() for tensor in cache] for cache in target]
    sources = [[tensor.clone() for tensor in cache] for cache in source]
    ops.swap_blocks(source, target, torch.tensor([4, 0]), torch.tensor([0, 2]))
    for layer in range(2):
        for src, dst, was, same in zip(
            source[layer], target[layer], before[layer], sources[layer], strict=True
        ):
            assert torch.equal(dst[[0, 2]], src[[4, 0]])
            assert torch.equal(dst[1], was[1])
            assert torch.equal(src, same)


def test_blocks_that_lie_together_move_together() -> None:
    src, dst = [0, 1, 2, 9, 8, 4, 5], [5, 6, 8, 9, 10, 0, 1]
    runs = list(neighbours(src, dst))
    assert runs == [(0, 5, 2), (2, 8, 1), (9, 9, 1), (8, 10, 1), (4, 0, 2)]
    assert list(neighbours([], [])) == []


@pytest.mark.gpu
def test_blocks_go_to_the_host_and_come_back() -> None:
    ops, cuda = TorchOps(), torch.device("cuda")
    spec = KVCacheSpec(6, 2, 1, 2, torch.bfloat16)
    device, other = ([ops.allocate_kv_cache(spec, cuda)] for _ in range(2))
    for tensor in device[0]:
        tensor.normal_()
    host = [LayerKVCache(*(torch.empty(x.shape, dtype=x.dtype).pin_memory() for x in device[0]))]
    ops.swap_blocks(device, host, torch.tensor([0, 1, 4]), torch.tensor([2, 3, 0]))
    ops.swap_blocks(host, other, torch.tensor([2, 3, 0]), torch.tensor([5, 0, 1]))
    for tensor, copied in zip(device[0], other[0], strict=True):
        assert torch.equal(copied[[5, 0, 1]], tensor[[0, 1, 4]])


def test_a_cache_on_a_cpu_takes_no_memory_before_it_is_used(ops: Ops) -> None:
    spec = KVCacheSpec(4096, 16, 8, 64, torch.bfloat16)  # 128 MiB
    before = _resident_bytes()
    cache = ops.allocate_kv_cache(spec, torch.device("cpu"))
    assert _resident_bytes() - before < 8 << 20
    assert cache.key.shape == (4096, 16, 8, 64)
    assert cache.key.data_ptr() % 64 == 0
    assert cache.value[::512].abs().sum() == 0


def _resident_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        line = next(line for line in file if line.startswith("Rss:"))
    return int(line.split()[1]) * 1024


def test_a_block_id_beyond_two_gibibytes(make_batch: Any, make_shape: Any) -> None:
    """Offsets into the cache must not be computed in 32 bits."""
    spec = KVCacheSpec(140_000, 16, 4, 64, torch.float32)  # 2.3 GB of keys, untouched
    ops = TorchOps()
    cache = ops.allocate_kv_cache(spec, torch.device("cpu"))
    k = torch.randn(3, 4, 64)
    last = spec.num_blocks - 1
    ops.store_kv(k, k, cache, torch.arange(3) + last * 16)
    assert torch.equal(cache.key[last, :3], k)
    batch = make_batch([(3, 1)], make_shape(4, 4, head_dim=64, block_size=16))
    batch.tables = [[last]]
    out = ops.attention(batch.q, cache, batch.metadata(), scale=0.1)
    weights = torch.softmax(torch.einsum("hd,shd->hs", batch.q[0], k) * 0.1, dim=-1)
    torch.testing.assert_close(out[0], torch.einsum("hs,shd->hd", weights, k))


def test_groups_bound_their_padding_and_size(make_batch: Any, make_shape: Any) -> None:
    rows = [(n, 1) for n in range(1, 400, 7)] + [(64, 64)] * 3
    batch = make_batch(rows, make_shape(block_size=16))
    groups = plan_attention(batch.metadata(), 16, None, torch.float32)
    assert sum(group.num_rows for group in groups) == len(rows)
    decodes = [group for group in groups if group.query_len == 1]
    assert len(decodes) < 30
    for group in decodes:
        assert group.num_rows * group.num_keys <= attention_plan.MAX_GROUP_TOKENS
        assert group.bias is not None
        num_padded = int(torch.isinf(group.bias).sum())
        assert num_padded <= attention_plan.MAX_PADDED_TOKENS
    (prefill,) = [group for group in groups if group.query_len == 64]
    assert prefill.is_causal
    assert prefill.num_rows == 3


def test_a_window_gathers_only_blocks_that_are_seen(make_batch: Any, make_shape: Any) -> None:
    batch = make_batch([(200, 1)], make_shape(block_size=8))
    (group,) = plan_attention(batch.metadata(), 8, 10, torch.float32)
    assert group.blocks.tolist() == batch.tables[0][-2:]


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_cpu(make_batch: Any, make_shape: Any) -> None:
    device = torch.device("cuda")
    batch = make_batch([(12, 1), (9, 9), (33, 1), (12, 4)], make_shape())
    ops = TorchOps()
    cache = LayerKVCache(*(tensor.nan_to_num().to(device) for tensor in batch.filled_cache(ops)))
    plan = batch.metadata()
    k = torch.cat([key[n - c :] for key, (n, c) in zip(batch.keys, batch.rows, strict=True)])
    v = torch.cat([value[n - c :] for value, (n, c) in zip(batch.values, batch.rows, strict=True)])
    metadata = type(plan)(
        plan.query_start_loc.to(device),
        plan.seq_lens.to(device),
        plan.block_tables.to(device),
        plan.slot_mapping.to(device),
        plan.query_lens_host,
        plan.seq_lens_host,
        plan.max_query_len,
        plan.max_seq_len,
    )
    ops.store_kv(k.to(device), v.to(device), cache, metadata.slot_mapping)
    out = ops.attention(batch.q.to(device), cache, metadata, scale=0.25)
    np.testing.assert_allclose(out.double().cpu().numpy(), batch.dense(), atol=1e-3)
