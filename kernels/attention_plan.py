"""Splits a flat batch into groups of rows that one dense attention call can serve.

A group's rows have the same number of query tokens; rows with a single one (decodes) are grouped by
length, so that short rows do not pay for long ones. The plan depends on the metadata alone, not on a
layer's tensors: an op set computes it once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    bias: Tensor | None  # [num_rows, 1, query_len, num_keys] 0 or -inf; None: all seen
    is_causal: bool  # every row is a whole prompt: plain causal masking is right, bias is None


class _Batch(NamedTuple):
    """What every group is built from. Arrays are ``[num_rows]``."""

    metadata: AttentionMetadata
    block_size: int
    window: int | None
    dtype: torch.dtype
    query_lens: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    starts: NDArray[np.int64]  # flat index of the first query token
    first_block: NDArray[np.int64]  # first block that any query sees


def plan_attention(
    metadata: AttentionMetadata, block_size: int, window: int | None, dtype: torch.dtype
) -> list[AttentionGroup]:
    """Group the rows of a batch.

    Args:
        metadata: the batch.
        block_size: tokens in a block.
        window: a query sees itself and the ``window - 1`` tokens before it; blocks before the
            first one that any query of a row sees are not gathered.
        dtype: of the queries, and so of the bias.
    """
    query_lens = np.asarray(metadata.query_lens_host, dtype=np.int64)
    seq_lens = np.asarray(metadata.seq_lens_host, dtype=np.int64)
    starts = np.cumsum(query_lens) - query_lens
    first_seen = np.zeros_like(seq_lens)
    if window is not None:
        first_seen = np.maximum(seq_lens - query_lens - window + 1, 0)
    first_block = first_seen // block_size
    num_keys = seq_lens - first_block * block_size
    batch = _Batch(metadata, block_size, window, dtype, query_lens, seq_lens, starts, first_block)
    return [_build_group(rows, batch) for rows in _group_rows(query_lens, num_keys)]


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


def _build_group(rows: NDArray[np.int64], batch: _Batch) -> AttentionGroup:
    query_len = int(batch.query_lens[rows[0]])
    seq_lens, first_key = batch.seq_lens[rows], batch.first_block[rows] * batch.block_size
    num_keys = int((seq_lens - first_key).max())
    is_uniform = bool((seq_lens - first_key == num_keys).all())
    is_whole = query_len == num_keys and batch.window is None
    sees_all = query_len == 1 and (batch.window is None or num_keys <= batch.window)
    bias = None
    if not (is_uniform and (is_whole or sees_all)):
        bias = _bias(seq_lens, first_key, query_len, num_keys, batch)
    return AttentionGroup(
        num_rows=len(rows),
        query_len=query_len,
        num_keys=num_keys,
        tokens=_tokens(batch.starts[rows], query_len, batch.metadata.block_tables.device),
        blocks=_blocks(rows, seq_lens, num_keys, batch),
        bias=bias,
        is_causal=query_len > 1 and bias is None,
    )


def _bias(
    seq_lens: NDArray[np.int64],
    first_key: NDArray[np.int64],
    query_len: int,
    num_keys: int,
    batch: _Batch,
) -> Tensor:
    """0 where a query sees a key, -inf elsewhere: ``[num_rows, 1, query_len, num_keys]``."""
    device = batch.metadata.block_tables.device
    first_query = torch.from_numpy(seq_lens - query_len).to(device)
    query = first_query.unsqueeze(1) + torch.arange(query_len, device=device)
    key = torch.from_numpy(first_key).to(device).unsqueeze(1) + torch.arange(
        num_keys, device=device
    )
    distance = query[:, None, :, None] - key[:, None, None, :]
    is_hidden = distance < 0
    if batch.window is not None:
        is_hidden |= distance >= batch.window
    bias = torch.zeros(is_hidden.shape, dtype=batch.dtype, device=device)
    return bias.masked_fill_(is_hidden, float("-inf"))


def _tokens(starts: NDArray[np.int64], query_len: int, device: torch.device) -> Tensor | slice:
    if (np.diff(starts) == query_len).all():
        return slice(int(starts[0]), int(starts[0]) + len(starts) * query_len)
    return torch.from_numpy((starts[:, None] + np.arange(query_len)).reshape(-1)).to(device)


def _blocks(
    rows: NDArray[np.int64], seq_lens: NDArray[np.int64], num_keys: int, batch: _Batch
) -> Tensor:
    """Ids of the blocks to gather. Past its last block a row repeats it: masked, but finite."""
    tables = batch.metadata.block_tables
    last = (seq_lens - 1) // batch.block_size
    first = batch.first_block[rows]
    wanted = first[:, None] + np.arange(-(-num_keys // batch.block_size))
    columns = torch.from_numpy(np.minimum(wanted, last[:, None])).to(tables.device)
    row_ids = torch.from_numpy(rows).to(tables.device)
    return tables[row_ids].gather(1, columns).reshape(-1).long()
