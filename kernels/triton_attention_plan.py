"""What each program of an attention launch does, decided on the host from a batch's lengths.

Rows with few query tokens (decodes) and rows with many (prefills) take differently shaped tiles, in a launch
each. Every tile is a line in a list, so the grid has as many programs as there is work, and a short sequence
beside a long one costs its own length. Long tiles come first: whoever is free takes the next, and the last
ones to end are short (Graham, 1969, list scheduling).

A row of few query tokens is split over its keys where it is long (flash-decoding: Dao et al., 2023). Into how
many parts depends on its own length and the device alone, never on its neighbours: so neither do the
rounding of its result and the steps that it takes, which are counted from position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE_COLUMNS = (
    "row",  # of the block table
    "first_token",  # in the flat batch
    "num_tokens",
    "first_position",  # of first_token in its sequence
    "begin",  # keys: a multiple of the step
    "end",
    "partial_row",  # where partial results of first_token go; -1: to the output
    "is_first",  # whether these keys are the first that the tile sees
)
MERGE_COLUMNS = ("token", "partial_row", "row_stride", "num_splits", "", "", "", "")
NUM_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a plan must know of a tile: how many query tokens it holds, and in what steps keys are taken."""

    num_tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How long a part of a split row may be."""

    min_keys: int  # shorter parts cost more in starting and merging than they gain
    max_parts: int  # that a lone row is given: as many as fill the device


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Lists for one step's launches, on the device. The same for all layers with one window."""

    prefill_tiles: Tensor  # [num_tiles, 8] int32, TILE_COLUMNS
    decode_tiles: Tensor  # [num_tiles, 8] int32, TILE_COLUMNS
    merges: Tensor  # [num_split_tokens, 8] int32, MERGE_COLUMNS
    num_partial_rows: int


Table = NDArray[np.int64]
"""``[n, 8]``."""


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    prefill: TileShape,
    decode: TileShape,
    split: SplitRule,
    window: int | None,
    device: torch.device,
) -> AttentionPlan:
    """Lay out a batch of rows.

    Args:
        query_lens: query tokens of each row, at least one.
        seq_lens: tokens of each row's sequence, its query tokens the last of them.
        prefill: tiles of rows that ``decode``'s do not hold.
        decode: tiles of rows with few query tokens.
        split: how decode rows are split.
        window: a query sees itself and the ``window - 1`` tokens before it.
        device: where the lists go.
    """
    counts = np.asarray(query_lens, dtype=np.int64)
    lengths = np.asarray(seq_lens, dtype=np.int64)
    rows = _whole_rows(counts, lengths)
    is_short = counts <= decode.num_tokens
    prefill_tiles = _begin_at_window(_cut_tokens(rows[~is_short], prefill), prefill, window)
    short = _begin_at_window(rows[is_short], decode, window)
    decode_tiles, merges, num_partial_rows = _split_keys(short, decode, split)
    tables = (_longest_first(prefill_tiles), _longest_first(decode_tiles), merges)
    ends = np.cumsum([len(table) for table in tables])
    together = torch.from_numpy(np.concatenate(tables).astype(np.int32))
    if device.type == "cuda":
        together = together.pin_memory().to(device, non_blocking=True)
    else:
        together = together.to(device)
    return AttentionPlan(
        together[: ends[0]], together[ends[0] : ends[1]], together[ends[1] :], num_partial_rows
    )


def _whole_rows(counts: Table, lengths: Table) -> Table:
    """A tile for every row, over all of its keys."""
    tiles = np.zeros((len(counts), NUM_COLUMNS), dtype=np.int64)
    tiles[:, 0] = np.arange(len(counts))
    tiles[:, 1] = np.cumsum(counts) - counts
    tiles[:, 2] = counts
    tiles[:, 3] = lengths - counts
    tiles[:, 5] = lengths
    tiles[:, 6] = -1
    tiles[:, 7] = 1
    return tiles


def _cut_tokens(rows: Table, shape: TileShape) -> Table:
    """Cut rows into tiles of ``shape.num_tokens`` query tokens."""
    tiles, place = _repeat(rows, _ceil_div(rows[:, 2], shape.num_tokens))
    skipped = place * shape.num_tokens
    tiles[:, 1] += skipped
    tiles[:, 3] += skipped
    tiles[:, 2] = np.minimum(tiles[:, 2] - skipped, shape.num_tokens)
    tiles[:, 5] = tiles[:, 3] + tiles[:, 2]
    return tiles


def _begin_at_window(tiles: Table, shape: TileShape, window: int | None) -> Table:
    """Leave out the steps before the first key that a tile's first query sees."""
    if window is not None:
        first_seen = np.maximum(tiles[:, 3] - window + 1, 0)
        tiles[:, 4] = first_seen // shape.step * shape.step
    return tiles


def _split_keys(rows: Table, shape: TileShape, split: SplitRule) -> tuple[Table, Table, int]:
    """Split long rows over their keys → tiles, merges, number of partial rows."""
    num_keys = rows[:, 5] - rows[:, 4]
    part = np.maximum(split.min_keys, _ceil_div(num_keys, split.max_parts))
    num_parts = _ceil_div(num_keys, part)
    part = _ceil_div(_ceil_div(num_keys, num_parts), shape.step) * shape.step
    num_parts = _ceil_div(num_keys, part)
    tiles, place = _repeat(rows, num_parts)
    length = np.repeat(part, num_parts)
    tiles[:, 4] += place * length
    tiles[:, 5] = np.minimum(tiles[:, 4] + length, tiles[:, 5])
    tiles[:, 7] = place == 0

    is_split = num_parts > 1
    num_partial = np.where(is_split, num_parts * rows[:, 2], 0)
    partial_begin = np.cumsum(num_partial) - num_partial
    partial_row = np.repeat(partial_begin, num_parts) + place * tiles[:, 2]
    tiles[:, 6] = np.where(np.repeat(is_split, num_parts), partial_row, -1)

    merges, token = _repeat(np.zeros_like(rows[is_split]), rows[is_split, 2])
    for column, values in enumerate(
        (rows[:, 1], partial_begin, rows[:, 2], num_parts),
    ):
        merges[:, column] = np.repeat(values[is_split], rows[is_split, 2])
    merges[:, 0] += token
    merges[:, 1] += token
    return tiles, merges, int(num_partial.sum())


def _longest_first(tiles: Table) -> Table:
    return tiles[np.argsort(tiles[:, 4] - tiles[:, 5], kind="stable")]


def _repeat(table: Table, times: Table) -> tuple[Table, Table]:
    """Each line ``times`` times → the lines, and each one's place among its copies."""
    ends = np.cumsum(times)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(table, times, axis=0), np.arange(total) - np.repeat(ends - times, times)


def _ceil_div(a: Table, b: Table | int) -> Table:
    return -(-a // b)
