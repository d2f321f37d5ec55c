"""Steps on made-up tokens and blocks: one as large as they can get, one that uses the host tier."""

from __future__ import annotations

from ..api import SamplingParams
from ..step import BlockSwap, NewRow, ScheduledRow, StepPlan

STEP_ID = -1
MAX_SWAPPED_BLOCKS = 16


def largest_step(
    num_tokens: int, num_rows: int, *, block_size: int, num_blocks: int, max_model_len: int
) -> StepPlan:
    """One long row, and ``num_rows - 1`` of one token; every row samples, by the dearest rules.

    Sequence ids are negative. Gets smaller where the pool or the window does not hold as much.
    """
    num_short = max(0, min(num_rows, num_tokens, num_blocks) - 1)
    room = min((num_blocks - num_short) * block_size, max_model_len)
    lengths = [max(1, min(num_tokens - num_short, room)), *([1] * num_short)]
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    new_rows, rows, next_block = [], [], 0
    for index, length in enumerate(lengths):
        seq_id = -1 - index
        blocks = list(range(next_block, next_block + -(-length // block_size)))
        next_block += len(blocks)
        new_rows.append(NewRow(seq_id, [0] * length, (), sampling, 0))
        rows.append(ScheduledRow(seq_id, 0, length, 1, (blocks,), 0))
    return StepPlan(STEP_ID, new_rows=tuple(new_rows), rows=tuple(rows))


def round_trip_step(num_blocks: int) -> StepPlan:
    """Moves the first blocks to the host tier and back, which changes none of them."""
    swaps = [
        BlockSwap(0, block_id, block_id, to_host)
        for to_host in (True, False)
        for block_id in range(num_blocks)
    ]
    return StepPlan(STEP_ID, block_swaps=tuple(swaps))


def cleanup_step(plan: StepPlan) -> StepPlan:
    """Removes every row of ``plan``."""
    return StepPlan(STEP_ID, removed_seq_ids=tuple(new.seq_id for new in plan.new_rows))
