"""Keys and values on their way into the paged cache, in Triton: norm, rotary and store in one launch.

A program takes some heads of one token: query heads are turned into a tensor of their own, key heads are
turned and written to the token's slot together with the value heads. The layout of the cache is the default,
``[num_blocks, block_size, num_kv_heads, head_dim]``, so a slot is a row of ``num_kv_heads * head_dim``
numbers; its offset is counted in 64 bits. Rounds where separate ops would: after the norm, after rotary.

fp8 (e4m3, no infinities) is encoded by integer arithmetic, the same on every GPU, as not all convert in
hardware: to the nearest, ties to even, saturating at 448, NaN kept.
"""

# Kernel parameters carry no annotations but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ops import KVScales, LayerKVCache

MAX_TILE = 2048
"""Most numbers of each half that a program turns."""


@triton.jit
def fp8_e4m3_code(x):
    """The e4m3 codes (uint8) of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    is_odd = (size_bits >> 20) & 1
    normal = ((size_bits + 0x7FFFF + is_odd) >> 20) - ((127 - 7) << 3)
    # Adding 2**23 rounds to a whole number of the smallest steps, 2**-9, in the lowest bits.
    subnormal = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write(ptr, values, mask, inverse_scale, IS_FP8: tl.constexpr):
    scaled = values.to(tl.float32) * inverse_scale
    if IS_FP8:
        tl.store(ptr, fp8_e4m3_code(scaled), mask=mask)
    else:
        tl.store(ptr, scaled.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _turn_heads(
    x_ptr,  # one token's heads, head_stride apart
    head_stride,
    heads,  # [HEADS]
    num_heads,
    norm_ptr,  # [HEAD_DIM]
    cos_sin_ptr,  # [2 * HALF] float32, of the token's position
    out_ptr,  # heads HEAD_DIM apart
    eps,
    inverse_scale,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Norm, turn and write some heads: two halves of ``HALF`` numbers that turn together, and the rest."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    pair = tl.arange(0, HALF_BLOCK)
    is_head = (heads < num_heads)[:, None]
    is_pair = is_head & (pair < HALF)[None, :]
    x_heads = x_ptr + heads[:, None] * head_stride
    out_heads = out_ptr + heads[:, None] * HEAD_DIM
    given = tl.load(x_heads + pair[None, :], mask=is_pair, other=0.0)
    first = given.to(tl.float32)
    second = tl.load(x_heads + HALF + pair[None, :], mask=is_pair, other=0.0).to(tl.float32)
    tail = tl.arange(0, REST_BLOCK)
    is_tail = is_head & (tail < REST)[None, :]
    rest = tl.load(x_heads + 2 * HALF + tail[None, :], mask=is_tail, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        first = (first * scale * weight[None, :]).to(given.dtype).to(tl.float32)
        weight = tl.load(norm_ptr + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        second = (second * scale * weight[None, :]).to(given.dtype).to(tl.float32)
        weight = tl.load(norm_ptr + 2 * HALF + tail, mask=tail < REST, other=0.0).to(tl.float32)
        rest = (rest * scale * weight[None, :]).to(given.dtype).to(tl.float32)
    if HAS_ROTARY:
        cos = tl.load(cos_sin_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(cos_sin_ptr + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    _write(out_heads + pair[None, :], first.to(given.dtype), is_pair, inverse_scale, IS_FP8)
    _write(out_heads + HALF + pair[None, :], second.to(given.dtype), is_pair, inverse_scale, IS_FP8)
    if REST > 0:
        place = out_heads + 2 * HALF + tail[None, :]
        _write(place, rest.to(given.dtype), is_tail, inverse_scale, IS_FP8)


@triton.jit
def rotary_store_kernel(
    q_ptr,  # [num_tokens, NUM_Q, HEAD_DIM]
    k_ptr,  # [num_tokens, NUM_KV, HEAD_DIM]
    v_ptr,  # [num_tokens, NUM_KV, HEAD_DIM]
    q_out_ptr,  # [num_tokens, NUM_Q, HEAD_DIM], contiguous
    key_ptr,  # the cache's keys, or [num_tokens, NUM_KV, HEAD_DIM], as TO_CACHE
    value_ptr,  # the cache's values
    slot_ptr,  # [num_tokens] int64; -1: do not store
    position_ptr,  # [num_tokens] int64
    cos_sin_ptr,  # [max_position, 2 * HALF] float32
    q_norm_ptr,  # [HEAD_DIM]
    k_norm_ptr,  # [HEAD_DIM]
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    eps,
    inverse_k_scale,
    inverse_v_scale,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    TO_CACHE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    Q_TILES: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos_sin = cos_sin_ptr
    if HAS_ROTARY:
        cos_sin += tl.load(position_ptr + token) * (2 * HALF)
    if tile < Q_TILES:
        heads = tile * HEADS + tl.arange(0, HEADS)
        q = q_ptr + token * q_token_stride
        out = q_out_ptr + token * (NUM_Q * HEAD_DIM)
        _turn_heads(
            q, q_head_stride, heads, NUM_Q, q_norm_ptr, cos_sin, out, eps, 1.0,
            HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, HAS_NORM, HAS_ROTARY, False,
        )  # fmt: skip
    else:
        heads = (tile - Q_TILES) * HEADS + tl.arange(0, HEADS)
        slot = token
        if TO_CACHE:
            slot = tl.load(slot_ptr + token)
        if slot >= 0:
            place = slot * (NUM_KV * HEAD_DIM)
            k = k_ptr + token * k_token_stride
            _turn_heads(
                k, k_head_stride, heads, NUM_KV, k_norm_ptr, cos_sin, key_ptr + place, eps,
                inverse_k_scale, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, HAS_NORM, HAS_ROTARY, IS_FP8,
            )  # fmt: skip
            if TO_CACHE:
                column = tl.arange(0, HEAD_BLOCK)[None, :]
                mask = (heads < NUM_KV)[:, None] & (column < HEAD_DIM)
                v = v_ptr + token * v_token_stride + heads[:, None] * v_head_stride + column
                values = tl.load(v, mask=mask, other=0.0)
                target = value_ptr + place + heads[:, None] * HEAD_DIM + column
                _write(target, values, mask, inverse_v_scale, IS_FP8)


def rotary_store_launch(
    num_q_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int
) -> dict[str, int | bool]:
    """Constants of a launch over these heads; ``rotary_dim`` 0: without rotary."""
    half = (rotary_dim or head_dim) // 2
    half_block = triton.next_power_of_2(max(1, half))
    most_heads = triton.next_power_of_2(max(num_q_heads, num_kv_heads))
    heads = max(1, min(8, most_heads, MAX_TILE // half_block))
    return {
        "NUM_Q": num_q_heads,
        "NUM_KV": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HALF_BLOCK": half_block,
        "REST_BLOCK": triton.next_power_of_2(max(1, head_dim - 2 * half)),
        "HEADS": heads,
        "HEAD_BLOCK": triton.next_power_of_2(head_dim),
        "HAS_ROTARY": rotary_dim > 0,
        "num_warps": max(1, min(4, heads * half_block // 256)),
    }


def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: LayerKVCache,
    slot_mapping: Tensor,
    kv_scales: KVScales | None = None,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See :meth:`~.reference.ReferenceOps.rotary_store`."""
    return _launch(
        q, k, v, positions, cos_sin, cache, slot_mapping,
        q_norm=q_norm, k_norm=k_norm, eps=eps, kv_scales=kv_scales,
    )[0]  # fmt: skip


def store_kv(
    k: Tensor,
    v: Tensor,
    cache: LayerKVCache,
    slot_mapping: Tensor,
    kv_scales: KVScales | None = None,
) -> None:
    """See :meth:`~.ops.Ops.store_kv`."""
    _launch(None, k, v, None, None, cache, slot_mapping, kv_scales=kv_scales)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See :meth:`~.ops.Ops.rotary`."""
    return _launch(q, k, None, positions, cos_sin, None, None)


def _launch(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    cache: LayerKVCache | None,
    slots: Tensor | None,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    kv_scales: KVScales | None = None,
) -> tuple[Tensor, Tensor]:
    """``(q turned, k turned)``; the latter is the cache's keys where there is a cache."""
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are normed together, or not at all")
    if any(x is not None and x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("the numbers of a head must lie side by side")
    scales = kv_scales or KVScales(1.0, 1.0)
    num_tokens, num_kv_heads, head_dim = k.shape
    num_q_heads = 0 if q is None else q.shape[1]
    q_out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=k.dtype, device=k.device)
    key, value = (torch.empty_like(q_out), None) if cache is None else cache
    if cache is None:
        key = torch.empty((num_tokens, num_kv_heads, head_dim), dtype=k.dtype, device=k.device)
    is_fp8 = key.dtype == torch.float8_e4m3fn
    launch = rotary_store_launch(
        num_q_heads, num_kv_heads, head_dim, 0 if cos_sin is None else cos_sin.shape[1]
    )
    num_tiles = sum(triton.cdiv(num, launch["HEADS"]) for num in (num_q_heads, num_kv_heads))
    if num_tokens:
        rotary_store_kernel[(num_tokens, num_tiles)](
            q,
            k,
            v,
            q_out,
            key.view(torch.uint8) if is_fp8 else key,
            value.view(torch.uint8) if is_fp8 and value is not None else value,
            slots,
            positions,
            cos_sin,
            q_norm,
            k_norm,
            *((0, 0) if q is None else q.stride()[:2]),
            *k.stride()[:2],
            *((0, 0) if v is None else v.stride()[:2]),
            eps,
            1.0 / scales.key,
            1.0 / scales.value,
            HAS_NORM=q_norm is not None,
            TO_CACHE=cache is not None,
            IS_FP8=is_fp8,
            enable_fp_fusion=True,
            **launch,
        )
    return q_out, key
