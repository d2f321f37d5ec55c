"""Dense attention over one group of rows gathered from paged keys and values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .attention_plan import AttentionGroup
from .ops import LayerKVCache


def attend_group(
    q: Tensor, cache: LayerKVCache, group: AttentionGroup, scale: float, soft_cap: float | None
) -> Tensor:
    """Attention of a group's query tokens.

    Args:
        q: ``[num_rows * query_len, num_q_heads, head_dim]``.
        cache: keys and values, ``[num_blocks, block_size, num_kv_heads, head_dim]`` each.
        group: which blocks to gather and what each query sees.
        scale: multiplies ``q · k``.
        soft_cap: see :meth:`~.ops.Ops.attention`.

    Returns:
        ``[num_rows * query_len, num_q_heads, head_dim]``, q's dtype.
    """
    keys = _gather(cache.key, group).to(q.dtype)
    values = _gather(cache.value, group).to(q.dtype)
    if soft_cap is not None:
        return _attend_capped(q, keys, values, group, scale, soft_cap)
    if group.query_len == 1:
        return _attend_decodes(q, keys, values, group, scale)
    return _attend_prefills(q, keys, values, group, scale)


def _gather(cache: Tensor, group: AttentionGroup) -> Tensor:
    """``[num_rows, num_kv_heads, num_keys, head_dim]``, a strided view of the gathered blocks."""
    num_blocks, _, num_kv_heads, head_dim = cache.shape
    gathered = cache.view(num_blocks, -1).index_select(0, group.blocks)
    rows = gathered.view(group.num_rows, -1, num_kv_heads, head_dim)
    return rows[:, : group.num_keys].transpose(1, 2)


def _attend_decodes(
    q: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scale: float
) -> Tensor:
    """One query token a row: the query heads that share a KV head become its queries."""
    num_rows, num_kv_heads, _, head_dim = keys.shape
    queries = q.view(num_rows, num_kv_heads, -1, head_dim)
    out = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=group.bias, scale=scale
    )
    return out.reshape(q.shape)


def _attend_prefills(
    q: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scale: float
) -> Tensor:
    queries = q.view(group.num_rows, group.query_len, *q.shape[1:]).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=group.bias,
        is_causal=group.is_causal,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return out.transpose(1, 2).reshape(q.shape)


def _attend_capped(
    q: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scale: float, soft_cap: float
) -> Tensor:
    """With a soft cap on the scores, which no fused attention offers: plain float32 products."""
    num_rows, num_kv_heads, num_keys, head_dim = keys.shape
    by_row = q.float().view(num_rows, group.query_len, num_kv_heads, -1, head_dim)
    queries = by_row.permute(0, 2, 3, 1, 4)  # [num_rows, num_kv_heads, group, query_len, head_dim]
    flat = queries.reshape(num_rows, num_kv_heads, -1, head_dim)
    scores = torch.matmul(flat, keys.float().transpose(-1, -2)).mul_(scale / soft_cap)
    scores = scores.tanh_().mul_(soft_cap).view(*queries.shape[:4], num_keys)
    if group.is_causal:
        later = torch.ones(group.query_len, num_keys, dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(later, float("-inf"))
    elif group.bias is not None:
        scores = scores + group.bias.unsqueeze(1)
    weights = torch.softmax(scores, dim=-1).view(*flat.shape[:3], num_keys)
    out = torch.matmul(weights, values.float()).view(queries.shape)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape).to(q.dtype)
