"""The paged attention kernels against their twin, with NaN in all that must not be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.ops import AttentionMetadata, KVScales, LayerKVCache
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.triton_attention import TritonAttention
from octavo.kernels.triton_gpu import ARCHITECTURES, Gpu
from octavo.kernels.triton_table import Tile

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BATCHES = {
    "one token": [(1, 1)],
    "decodes of many lengths": [(5, 1), (1, 1), (33, 1), (17, 1), (16, 1), (129, 1)],
    "whole prompts": [(7, 7), (65, 65), (2, 2)],
    "later chunks": [(140, 70), (40, 5), (33, 32)],
    "prefill and decode": [(12, 1), (9, 9), (33, 1), (75, 40), (1, 1)],
}
LONG = [(1, 1), (1300, 1), (20, 20), (513, 1), (1200, 3)]
"""Rows that are split beside rows that are not."""


def attend(batch: Any, *, arch: str = "sm_90", num_sms: int = 8, **options: Any) -> Tensor:
    attention = TritonAttention(Gpu(ARCHITECTURES[arch], num_sms))
    return attention(
        batch.q, batch.cache, batch.metadata(), scale=0.25, window=batch.window, **options
    )


def expect(batch: Any, **options: Any) -> Tensor:
    return ReferenceOps().attention(
        batch.q, batch.cache, batch.metadata(), scale=0.25, window=batch.window, **options
    )


def check(batch: Any, *, arch: str = "sm_90", num_sms: int = 8, **options: Any) -> None:
    out = attend(batch, arch=arch, num_sms=num_sms, **options)
    tolerance = TOLERANCE[batch.dtype]
    torch.testing.assert_close(out, expect(batch, **options), atol=tolerance, rtol=tolerance)


@pytest.mark.smoke
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_its_twin(make_batch: Any, rows: Any, dtype: torch.dtype) -> None:
    check(make_batch(rows, dtype=dtype))


@pytest.mark.smoke
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_are_split(make_batch: Any, window: int | None, dtype: torch.dtype) -> None:
    check(make_batch(LONG, dtype=dtype, window=window))


def test_a_part_may_hold_no_key_that_a_token_sees(
    make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part begins at the row's last token; the two before it see nothing of it."""
    from octavo.kernels import triton_attention

    monkeypatch.setattr(triton_attention, "MIN_SPLIT_KEYS", 16)
    batch = make_batch([(145, 3)])
    attention = TritonAttention(
        Gpu(ARCHITECTURES["sm_90"], 64), tiles={"decode": Tile(16, 16, 4, 3)}
    )
    out = attention(batch.q, batch.cache, batch.metadata(), scale=0.25)
    torch.testing.assert_close(out, expect(batch), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_block_sizes(make_batch: Any, rows: Any, block_size: int) -> None:
    check(make_batch(rows, block_size=block_size))


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (7, 1), (40, 1), (8, 1)], ids=str)
def test_groups_of_heads(make_batch: Any, heads: tuple[int, int]) -> None:
    """A group of 40 does not fit into a decode tile of 16 rows."""
    rows = [(17, 1), (70, 1), (19, 19), (90, 33)]
    check(make_batch(rows, num_q_heads=heads[0], num_kv_heads=heads[1]))


@pytest.mark.parametrize("head_dim", [8, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_dims(make_batch: Any, head_dim: int, dtype: torch.dtype) -> None:
    check(make_batch([(17, 1), (70, 1), (90, 33)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("window", [1, 5, 16, 64, 100, 1000])
@pytest.mark.parametrize("rows", [*BATCHES.values(), [(300, 200), (290, 1)]], ids=str)
def test_windows_cross_blocks_and_chunks(make_batch: Any, rows: Any, window: int) -> None:
    check(make_batch(rows, window=window))


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_soft_cap(make_batch: Any, rows: Any, window: int | None) -> None:
    batch = make_batch(rows, window=window)
    check(batch, soft_cap=2.0)
    assert not torch.allclose(attend(batch, soft_cap=0.1), attend(batch), atol=1e-2) or rows == [
        (1, 1)
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("rows", [BATCHES["prefill and decode"], LONG], ids=str)
def test_sinks(make_batch: Any, rows: Any, window: int | None) -> None:
    batch = make_batch(rows, window=window)
    sinks = torch.tensor([-3.0, 2.0, 8.0, 30.0])
    check(batch, sinks=sinks)
    check(batch, sinks=sinks.bfloat16(), soft_cap=1.5)
    assert attend(batch, sinks=sinks)[:, 3].abs().max() < 1e-3  # the sink takes all of it


@pytest.mark.smoke
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_with_scales(make_batch: Any, arch: str, dtype: torch.dtype) -> None:
    """sm_80 and gfx942 read e4m3 as bits, sm_90 as numbers."""
    batch = make_batch(
        [(12, 1), (75, 40), (600, 1)], dtype=dtype, cache_dtype=torch.float8_e4m3fn, head_dim=80
    )
    check(batch, arch=arch, kv_scales=KVScales(0.5, 3.0))
    check(batch, arch=arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_fp8_number_is_read_as_it_is(make_batch: Any, arch: str) -> None:
    """A sequence of one token: its attention is its value. The interpreter reads a true e4m3's NaN as 480."""
    batch = make_batch([(1, 1)], cache_dtype=torch.float8_e4m3fn, head_dim=256)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    batch.cache.value[batch.tables[0][0], 0, 0] = numbers
    out, expected = attend(batch, arch=arch)[0, 0], numbers.float()
    is_nan = expected.isnan()
    assert is_nan.sum() == 2
    assert torch.equal(out[~is_nan], expected[~is_nan])
    assert arch == "sm_90" or out[is_nan].isnan().all()


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_caches_of_another_type(
    make_batch: Any, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    check(make_batch(BATCHES["prefill and decode"], dtype=dtype, cache_dtype=cache_dtype))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "gfx942"])
def test_every_architectures_tiles(make_batch: Any, arch: str) -> None:
    check(make_batch([(12, 1), (140, 70), (600, 1)], window=100), arch=arch)


@st.composite
def _rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    return [(n, draw(st.one_of(st.just(1), st.integers(1, n)))) for n in lengths]


@given(
    rows=_rows(),
    heads=st.sampled_from([(2, 2), (6, 2), (5, 1)]),
    block_size=st.sampled_from([16, 32, 40]),
    window=st.one_of(st.none(), st.integers(1, 160)),
    soft_cap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_any_batch_equals_the_twin(
    make_batch: Any,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    batch = make_batch(
        rows,
        *heads,
        block_size=block_size,
        window=window,
        dtype=dtype,
        seed=seed,
    )
    sinks = torch.randn(heads[0], generator=batch.random) if has_sinks else None
    check(batch, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize("window", [None, 300])
def test_a_rows_result_does_not_depend_on_its_company(make_batch: Any, window: int | None) -> None:
    """Bit for bit: alone, beside others, and computed by chunks of other sizes."""
    batch = make_batch(LONG, window=window, dtype=torch.bfloat16)
    together, metadata, begin = attend(batch), batch.metadata(), 0
    for row, (seq_len, count) in enumerate(LONG):
        alone = _one_row(metadata, row, seq_len, count)
        attention = TritonAttention(Gpu(ARCHITECTURES["sm_90"], 8))
        q = batch.q[begin : begin + count]
        out = attention(q, batch.cache, alone, scale=0.25, window=window)
        assert torch.equal(out, together[begin : begin + count])
        begin += count


def test_a_prompts_result_does_not_depend_on_its_chunks(make_batch: Any) -> None:
    batch = make_batch([(300, 300)], window=100, dtype=torch.bfloat16)
    whole, parts = attend(batch), []
    for begin, end in ((0, 130), (130, 290)):
        chunk = _one_row(batch.metadata(), 0, end, end - begin)
        attention = TritonAttention(Gpu(ARCHITECTURES["sm_90"], 8))
        parts.append(attention(batch.q[begin:end], batch.cache, chunk, scale=0.25, window=100))
    assert torch.equal(torch.cat(parts), whole[:290])


def _one_row(metadata: AttentionMetadata, row: int, seq_len: int, count: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_tables=metadata.block_tables[row : row + 1],
        slot_mapping=torch.full((count,), -1),
        query_lens_host=[count],
        seq_lens_host=[seq_len],
        max_query_len=count,
        max_seq_len=seq_len,
    )


def test_a_nan_row_leaves_its_neighbours_alone(make_batch: Any) -> None:
    batch = make_batch([(20, 1), (40, 1), (30, 10), (50, 30)])
    expected = attend(batch)
    for row in (1, 3):
        for block in batch.tables[row]:
            batch.cache.key[block] = float("nan")
    out = attend(batch)
    healthy = torch.tensor([0, *range(2, 12)])
    assert torch.equal(out[healthy], expected[healthy])
    assert out[1].isnan().all()
    assert out[12:].isnan().all()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("row", [(20, 1), (40, 40)], ids=str)
def test_block_ids_whose_offset_passes_31_bits(cache_dtype: torch.dtype, row: Any) -> None:
    """The cache's blocks are views of few numbers; their addresses are true ones."""
    num_kv_heads, head_dim, block_size = 2, 64, 16
    block_numbers = block_size * num_kv_heads * head_dim
    num_blocks = (1 << 32) // block_numbers + 3  # offsets past 2^32 elements
    key, value = (_untouched(num_blocks, block_numbers, cache_dtype) for _ in range(2))
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    cache = LayerKVCache(key.view(shape), value.view(shape))
    ids = [num_blocks - 1, num_blocks // 2 + 1, 0]
    small = LayerKVCache(*(torch.randn(3, *shape[1:]).to(cache_dtype) for _ in range(2)))
    for i, block in enumerate(ids):
        cache.key[block], cache.value[block] = small.key[i], small.value[i]
    seq_len, count = row
    q = torch.randn(count, 4, head_dim, dtype=torch.bfloat16)
    far, near = (
        AttentionMetadata(
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([seq_len], dtype=torch.int32),
            torch.tensor([table], dtype=torch.int32),
            torch.full((count,), -1),
            [count],
            [seq_len],
            count,
            seq_len,
        )
        for table in (ids, [0, 1, 2])
    )
    attention = TritonAttention(Gpu(ARCHITECTURES["sm_90"], 8))
    expected = attention(q, small, near, scale=0.25)
    assert torch.equal(attention(q, cache, far, scale=0.25), expected)


def _untouched(num_blocks: int, block_numbers: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    from octavo.kernels.kv_store import untouched_zeros

    return untouched_zeros((num_blocks, block_numbers), dtype)


def test_one_plan_serves_all_layers_of_a_step(
    make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.kernels import triton_attention, triton_attention_plan

    calls = []
    plan = triton_attention_plan.plan_attention

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options["window"])
        return plan(*args, **options)

    monkeypatch.setattr(triton_attention, "plan_attention", counted)
    batch = make_batch([(12, 1), (30, 30)])
    attention = TritonAttention(Gpu(ARCHITECTURES["sm_90"], 8))
    for metadata in (batch.metadata(), batch.metadata()):
        for window in (None, 8, None, 8):
            attention(batch.q, batch.cache, metadata, scale=0.25, window=window)
    assert calls == [None, 8, None, 8]


def test_warm_up_reaches_every_kernel(make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels import triton_attention

    launched: list[Any] = []
    for name in ("attention_kernel", "merge_kernel"):
        monkeypatch.setattr(triton_attention, name, _Noted(name, launched))
    batch = make_batch([(12, 1)])
    TritonAttention(Gpu(ARCHITECTURES["sm_90"], 8)).warm_up(batch.q, batch.cache, scale=0.25)
    assert launched == [
        ("attention_kernel", False),
        ("attention_kernel", True),
        ("merge_kernel", None),
    ]


class _Noted:
    def __init__(self, name: str, launched: list[Any]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **options: self.launched.append((self.name, options.get("IS_SPLIT")))


def test_what_is_not_taken_is_refused(make_batch: Any) -> None:
    def refused(batch: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            attend(batch)

    refused(make_batch([(1, 1)], dtype=torch.float64), "float64 queries")
    refused(make_batch([(1, 1)], cache_dtype=torch.float64), "float64 keys")
    refused(make_batch([(1, 1)], cache_dtype=torch.float8_e5m2), "float8_e5m2 keys")
    refused(make_batch([(1, 1)], head_dim=257), "up to 256, not 257")
    batch = make_batch([(1, 1)])
    batch.q = batch.q[:, :3]
    refused(batch, "do not go together")
    batch = make_batch([(1, 1)])
    batch.cache = LayerKVCache(*(tensor.transpose(1, 2) for tensor in batch.cache))
    refused(batch, "do not go together|contiguous blocks")
