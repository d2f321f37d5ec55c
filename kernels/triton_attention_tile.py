"""The attention kernel: one query tile over a range of its sequence's keys and values.

A program owns the query heads that share one KV head, for a few neighbouring query tokens: their rows form
one tile, so K and V are read once for all of them. It walks its range in steps of ``BLOCK_N`` keys with the
online softmax of FlashAttention-2 (Dao, 2023, arXiv 2307.08691, section 3.1), in base 2. What it cannot see
is never loaded, and selected away rather than multiplied by zero: whatever lies there does not matter.

What a program does is a row of the plan (``triton_attention_plan.py``); a row's result depends on the row's
own sequence alone.
"""

# Kernel parameters carry no annotations but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

from .triton_product import product

LOWEST = tl.constexpr(-1.0e30)
"""Stands for "no score yet": finite, so that the difference of two is a number."""

LOG2_E = tl.constexpr(math.log2(math.e))


# The table's width changes from step to step.
@triton.jit(do_not_specialize=["table_stride"])
def attention_kernel(
    out_ptr,  # [num_tokens, num_q_heads, head_dim]
    partial_ptr,  # [num_partial_rows, num_q_heads, head_dim] float32
    lse_ptr,  # [num_partial_rows, num_q_heads] float32, base 2
    q_ptr,  # [num_tokens, num_q_heads, head_dim]
    key_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_ptr,  # the same
    tiles_ptr,  # [num_tiles, 8] int32, see PLAN_COLUMNS
    block_tables_ptr,  # [num_rows, max_num_blocks] int32
    sinks_ptr,  # [num_q_heads], read where HAS_SINKS
    table_stride,
    q_token_stride,
    q_head_stride,
    window,
    score_scale,  # to base 2 where there is no soft cap, to units of the cap where there is one
    soft_cap,  # in base 2
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    TILE_HEADS: tl.constexpr,  # of them in one tile
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # the next power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8_BITS: tl.constexpr,  # the cache holds e4m3 as uint8
    IS_SPLIT: tl.constexpr,  # tiles may cover a part of their keys
    SKIPS_MASKS: tl.constexpr,  # where every row sees every key of a step
):
    head_tiles: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    tile_ptr = tiles_ptr + tl.program_id(0) // (NUM_KV_HEADS * head_tiles) * 8
    head_tile = tl.program_id(0) % (NUM_KV_HEADS * head_tiles)
    kv_head = head_tile // head_tiles
    row, first_token, num_tokens, first_position, begin, end = _read_tile(tile_ptr)

    rows = tl.arange(0, BLOCK_M)
    token = rows // TILE_HEADS
    head_in_group = head_tile % head_tiles * TILE_HEADS + rows % TILE_HEADS
    is_row = (token < num_tokens) & (head_in_group < GROUP)
    q_head = kv_head * GROUP + head_in_group
    dims = tl.arange(0, HEAD_PAD)
    is_cell = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (first_token + token) * q_token_stride + q_head * q_head_stride
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=is_cell, other=0.0)

    is_first = tl.load(tile_ptr + 7) == 1
    top, total = _start(sinks_ptr, q_head, is_row, is_first, BLOCK_M, HAS_SINKS)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)

    position = first_position + token
    first_seen = 0  # keys before this one are seen by no row
    if HAS_WINDOW:
        first_seen = tl.maximum(first_position - window + 1, 0)
    table_ptr = block_tables_ptr + row * table_stride
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = (keys >= first_seen) & (keys < end)
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0)
        # 64 bits: a cache is larger than 2^31 bytes, and than 2^31 elements.
        slot = block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        cells = ((slot * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims[None, :]
        is_loaded = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        key = _as(tl.load(key_ptr + cells, mask=is_loaded, other=0.0), q.dtype, IS_FP8_BITS)
        value = _as(tl.load(value_ptr + cells, mask=is_loaded, other=0.0), q.dtype, IS_FP8_BITS)
        scores = product(q, tl.trans(key)) * score_scale
        if HAS_SOFT_CAP:
            scores = soft_cap * _tanh(scores)
        scores = _masked(
            scores,
            keys,
            is_key,
            position,
            start,
            first_position,
            first_position + num_tokens - 1,
            window,
            BLOCK_N,
            HAS_WINDOW,
            SKIPS_MASKS,
        )
        acc, top, total = _take(acc, top, total, scores, value)

    # A part of the keys may hold none that a token sees: its sum is 0, and so is its result.
    acc = acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    partial_row = -1
    if IS_SPLIT:
        partial_row = tl.load(tile_ptr + 6)
    num_q_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    if partial_row < 0:
        heads = (first_token + token) * num_q_heads + q_head
        cells = heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + cells, acc.to(out_ptr.dtype.element_ty), mask=is_cell)
    else:
        heads = (partial_row + token).to(tl.int64) * num_q_heads + q_head
        tl.store(partial_ptr + heads[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_cell)
        tl.store(lse_ptr + heads, top + tl.log2(total), mask=is_row)


@triton.jit
def _read_tile(tile_ptr):
    """A line's columns 0 to 5."""
    row = tl.load(tile_ptr).to(tl.int64)
    first_token = tl.load(tile_ptr + 1).to(tl.int64)
    num_tokens, first_position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    return (
        row,
        first_token,
        num_tokens,
        first_position,
        tl.load(tile_ptr + 4),
        tl.load(tile_ptr + 5),
    )


@triton.jit
def _take(acc, top, total, scores, value):
    """Add the values of one step, ``[BLOCK_N, HEAD_PAD]``, by their ``scores [BLOCK_M, BLOCK_N]``."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    acc = product(weights.to(value.dtype), value, acc * decay[:, None])
    return acc, new_top, total


@triton.jit
def _start(sinks_ptr, q_head, is_row, is_first, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Highest score and sum of weights before any key, ``[BLOCK_M]`` float32 each.

    A sink is a key without a value. The first part of the keys takes it, the others know nothing of it.
    """
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=is_row, other=0.0).to(tl.float32)
        top = tl.maximum(sink * LOG2_E, LOWEST)
        total = tl.where(is_first, 1.0, total)
    return top, total


@triton.jit
def _masked(
    scores,  # [BLOCK_M, BLOCK_N]
    keys,  # [BLOCK_N] positions
    is_key,  # [BLOCK_N]
    position,  # [BLOCK_M]
    start,
    first_position,
    last_position,
    window,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SKIPS_MASKS: tl.constexpr,
):
    """``scores``, -inf where a row does not see a key.

    Most steps of a prefill lie before the tile's first query and within its last one's window: as they are.
    """
    needs_mask = True
    if SKIPS_MASKS:
        needs_mask = start + BLOCK_N > first_position + 1
        if HAS_WINDOW:
            needs_mask = needs_mask | (start <= last_position - window)
    if needs_mask:
        is_seen = (keys[None, :] <= position[:, None]) & is_key[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    return scores


@triton.jit
def _as(x, dtype: tl.constexpr, IS_FP8_BITS: tl.constexpr):
    """What the cache holds, in the type of the products.

    e4m3 bits, moved to a float16's place, are the number divided by 256, subnormal ones too: the scales
    carry that factor. The one exception is NaN.
    """
    if IS_FP8_BITS:
        bits = x.to(tl.int16)
        magnitude = bits & 0x7F
        half = ((bits & 0x80) << 8) | tl.where(magnitude == 0x7F, 0x7FFF, magnitude << 7)
        x = half.to(tl.int16).to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2_E)) + 1.0)


@triton.jit
def merge_kernel(
    out_ptr,  # [num_tokens, num_q_heads, head_dim]
    partial_ptr,  # [num_partial_rows, num_q_heads, head_dim] float32
    lse_ptr,  # [num_partial_rows, num_q_heads] float32, base 2
    merges_ptr,  # [num_merges, 8] int32, see MERGE_COLUMNS
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # that are taken at a time
):
    """Flash-decoding's second step: one head of one token from the parts of its keys."""
    merge_ptr = merges_ptr + tl.program_id(0) // NUM_Q_HEADS * 8
    q_head = tl.program_id(0) % NUM_Q_HEADS
    token = tl.load(merge_ptr).to(tl.int64)
    first_row = tl.load(merge_ptr + 1).to(tl.int64)
    row_stride = tl.load(merge_ptr + 2)
    num_splits = tl.load(merge_ptr + 3)

    dims = tl.arange(0, HEAD_PAD)
    is_dim = dims < HEAD_DIM
    top = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_PAD], tl.float32)
    for start in tl.range(0, num_splits, NUM_PARTS):
        splits = start + tl.arange(0, NUM_PARTS)
        is_part = splits < num_splits
        cells = (first_row + splits * row_stride) * NUM_Q_HEADS + q_head
        lse = tl.load(lse_ptr + cells, mask=is_part, other=float("-inf"))
        part = tl.load(
            partial_ptr + cells[:, None] * HEAD_DIM + dims[None, :],
            mask=is_part[:, None] & is_dim[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0, keep_dims=True))
        weights = tl.exp2(lse - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0, keep_dims=True)
        acc = acc * decay + tl.sum(part * weights[:, None], 0)
        top = new_top
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * NUM_Q_HEADS + q_head) * HEAD_DIM + dims, out, mask=is_dim)
