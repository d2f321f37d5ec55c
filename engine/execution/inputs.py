"""From a step's plan to the flat tensors that a model takes.

Rows with one token come first, in the plan's order; then the others. Knows nothing of sampling beyond
which token's hidden state is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.ops import AttentionMetadata
from ..step import ScheduledRow
from .errors import ExecutionError
from .rows import RowTable
from .transfer import Transfer


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step feeds to the model."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: tuple[AttentionMetadata, ...]  # per KV group
    last_tokens: NDArray[np.int64]  # [num plan rows], flat index of each row's last token


def build_inputs(
    plan_rows: tuple[ScheduledRow, ...], table: RowTable, transfer: Transfer
) -> StepInputs:
    """Lay out the rows of a plan that ``table`` has applied. There is at least one row.

    Raises:
        ExecutionError: a row asks for tokens that do not exist, or for slots that it has no block for.
    """
    numbers = np.array(
        [
            (
                table.place_of(r.seq_id),
                r.start,
                r.num_tokens,
                r.num_unwritten,
                len(r.block_tables[0]),
            )
            for r in plan_rows
        ],
        dtype=np.int64,
    )
    _check(plan_rows, numbers, table)
    order = np.argsort(numbers[:, 2] != 1, kind="stable")
    places, starts, counts, num_unwritten, num_blocks = numbers[order].T
    ends = np.cumsum(counts)
    begins = ends - counts
    positions = np.arange(ends[-1]) + np.repeat(starts - begins, counts)
    token_places = np.repeat(places, counts)
    block_size = table.block_size
    blocks = table.block_tables[:, token_places, positions // block_size].astype(np.int64)
    slots = np.ascontiguousarray(blocks * block_size + positions % block_size)
    if num_unwritten.any():
        slots[:, positions < np.repeat(starts + num_unwritten, counts)] = -1
    last_tokens = np.empty(len(order), dtype=np.int64)
    last_tokens[order] = ends - 1
    seq_lens = starts + counts
    # Groups apart, so that each tensor is aligned.
    token_ids, positions_on_device, query_start_loc, lengths, *by_group = transfer.upload(
        table.tokens[token_places, positions].astype(np.int64),
        positions,
        np.concatenate(([0], ends)).astype(np.int32),
        seq_lens.astype(np.int32),
        *slots,
        *_padded_tables(table, places, num_blocks),
    )
    counts_host, seq_lens_host = counts.tolist(), seq_lens.tolist()
    max_query_len, num_decode_rows = int(counts.max()), int((counts == 1).sum())
    metadata = tuple(
        AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=lengths,
            block_tables=tables,
            slot_mapping=slot_mapping,
            query_lens_host=counts_host,
            seq_lens_host=seq_lens_host,
            max_query_len=max_query_len,
            max_seq_len=max(seq_lens_host),
            num_decode_rows=num_decode_rows,
        )
        for slot_mapping, tables in zip(by_group[: len(slots)], by_group[len(slots) :], strict=True)
    )
    return StepInputs(token_ids, positions_on_device, metadata, last_tokens)


def _check(
    plan_rows: tuple[ScheduledRow, ...], numbers: NDArray[np.int64], table: RowTable
) -> None:
    places, starts, counts, _, num_blocks = numbers.T
    ends = starts + counts
    is_broken = (counts < 1) | (starts < 0) | (ends > table.columns["num_tokens"][places])
    is_broken |= num_blocks * table.block_size < ends
    if is_broken.any():
        row = plan_rows[int(np.flatnonzero(is_broken)[0])]
        raise ExecutionError(
            f"sequence {row.seq_id} is scheduled from token {row.start} for {row.num_tokens} with "
            f"{len(row.block_tables[0])} blocks, which does not fit what is known of it"
        )


def _padded_tables(
    table: RowTable, places: NDArray[np.int64], num_blocks: NDArray[np.int64]
) -> NDArray[np.int32]:
    """``[num_groups, num_rows, max_num_blocks]``; past a row's last block stands its id once more."""
    columns = np.arange(int(num_blocks.max()))
    known = np.minimum(columns, num_blocks[:, None] - 1)
    return np.ascontiguousarray(table.block_tables[:, places[:, None], known])
