"""Splits a flat batch into groups of rows that one dense attention call can serve.

A group's rows have the same number of query tokens; rows with a single one (decodes) are grouped by
length, so that short rows do not pay for long ones. The plan depends on the metadata alone, not on a
layer's tensors: an op set computes it once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .ops import AttentionMetadata

MAX_PADDED_TOKENS = 512
"""A group ends before its padding exceeds this: another call costs about as much."""
MAX_GROUP_TOKENS = 8192
"""A group ends before it gathers more than this, so that what it gathers stays in the cache."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that are attended together, padded to ``num_keys``."""

    num_rows: int
    query_len: int
    num_keys: int
    tokens: Tensor | slice  # flat indices of the group's query tokens, row after row
    blocks: Tensor  # [num_rows * num_blocks] int64, what to gather; a row's own blocks only
    bias: Tensor | None  # [num_rows, 1, query_len, num_keys] float32, 0 or -inf; None: all seen
    is_causal: bool  # every row is a whole prompt: plain causal masking is right, bias is None


def plan_attention(
    metadata: AttentionMetadata, block_size: int, window: int | None
) -> list[AttentionGroup]:
    """Group the rows of a batch.

    Args:
        metadata: the batch.
        block_size: tokens in a block.
        window: a query sees itself and the ``window - 1`` tokens before it; blocks before the
            first one that any query of a row sees are not gathered.
    """
    query_lens = np.asarray(metadata.query_lens_host, dtype=np.int64)
    seq_lens = np.asarray(metadata.seq_lens_host, dtype=np.int64)
    starts = np.cumsum(query_lens) - query_lens
    first_seen = np.zeros_like(seq_lens)
    if window is not None:
        first_seen = np.maximum(seq_lens - query_lens - window + 1, 0)
    first_block = first_seen // block_size
    num_keys = seq_lens - first_block * block_size
    return [
        _build_group(rows, metadata, block_size, window, query_lens, seq_lens, starts, first_block)
        for rows in _group_rows(query_lens, num_keys)
    ]


def _group_rows(
    query_lens: NDArray[np.int64], num_keys: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Row numbers of each group, ascending."""
    decodes = np.flatnonzero(query_lens == 1)
    order = decodes[np.argsort(-num_keys[decodes], kind="stable")]
    yield from _split_by_length(order, num_keys[order].tolist())
    for query_len in np.unique(query_lens[query_lens > 1]).tolist():
        same = np.flatnonzero(query_lens == query_len)
        order = same[np.argsort(-num_keys[same], kind="stable")]
        lengths = num_keys[order]
        for part in np.split(order, np.flatnonzero(np.diff(lengths)) + 1):
            yield from _split_evenly(part, int(num_keys[part[0]]))


def _split_by_length(
    order: NDArray[np.int64], lengths: Sequence[int]
) -> Iterator[NDArray[np.int64]]:
    """Cut rows of descending ``lengths`` so that padding and size stay within their limits."""
    begin = padding = 0
    for end, length in enumerate(lengths):
        padding += lengths[begin] - length
        is_too_big = (end - begin + 1) * lengths[begin] > MAX_GROUP_TOKENS
        if end > begin and (padding > MAX_PADDED_TOKENS or is_too_big):
            yield np.sort(order[begin:end])
            begin, padding = end, 0
    if len(order):
        yield np.sort(order[begin:])


def _split_evenly(rows: NDArray[np.int64], num_keys: int) -> Iterator[NDArray[np.int64]]:
    size = max(1, MAX_GROUP_TOKENS // num_keys)
    for begin in range(0, len(rows), size):
        yield np.sort(rows[begin : begin + size])


def _build_group(
    rows: NDArray[np.int64],
    metadata: AttentionMetadata,
    block_size: int,
    window: int | None,
    query_lens: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    starts: NDArray[np.int64],
    first_block: NDArray[np.int64],
) -> AttentionGroup:
    query_len = int(query_lens[rows[0]])
    seq_len, first = seq_lens[rows], first_block[rows]
    num_keys = int((seq_len - first * block_size).max())
    is_uniform = bool((seq_len - first * block_size == num_keys).all())
    is_causal = query_len > 1 and is_uniform and query_len == num_keys and window is None
    bias = None
    if not is_causal and not (query_len == 1 and is_uniform and _sees_all(num_keys, window)):
        bias = _bias(seq_len, first * block_size, query_len, num_keys, window)
    device = metadata.block_tables.device
    return AttentionGroup(
        num_rows=len(rows),
        query_len=query_len,
        num_keys=num_keys,
        tokens=_tokens(starts[rows], query_len, device),
        blocks=_blocks(rows, seq_len, first, num_keys, block_size, metadata.block_tables),
        bias=None if bias is None else torch.from_numpy(bias).to(device),
        is_causal=is_causal,
    )


def _sees_all(num_keys: int, window: int | None) -> bool:
    return window is None or num_keys <= window


def _bias(
    seq_len: NDArray[np.int64],
    first_key: NDArray[np.int64],
    query_len: int,
    num_keys: int,
    window: int | None,
) -> NDArray[np.float32]:
    """0 where a query sees a key, -inf elsewhere: ``[num_rows, 1, query_len, num_keys]``."""
    query = (seq_len - query_len)[:, None] + np.arange(query_len)
    key = first_key[:, None] + np.arange(num_keys)
    distance = query[:, None, :, None] - key[:, None, None, :]
    is_seen = distance >= 0
    if window is not None:
        is_seen &= distance < window
    return np.where(is_seen, np.float32(0.0), np.float32(-np.inf))


def _tokens(starts: NDArray[np.int64], query_len: int, device: torch.device) -> Tensor | slice:
    if (np.diff(starts) == query_len).all():
        return slice(int(starts[0]), int(starts[0]) + len(starts) * query_len)
    return torch.from_numpy((starts[:, None] + np.arange(query_len)).reshape(-1)).to(device)


def _blocks(
    rows: NDArray[np.int64],
    seq_len: NDArray[np.int64],
    first: NDArray[np.int64],
    num_keys: int,
    block_size: int,
    block_tables: Tensor,
) -> Tensor:
    """Ids of the blocks to gather. Past its last block a row repeats it: masked, but finite."""
    last = (seq_len - 1) // block_size
    wanted = first[:, None] + np.arange(-(-num_keys // block_size))
    columns = torch.from_numpy(np.minimum(wanted, last[:, None])).to(block_tables.device)
    row_ids = torch.from_numpy(rows).to(block_tables.device)
    return block_tables[row_ids].gather(1, columns).reshape(-1).long()
