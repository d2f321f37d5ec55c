"""Steps on made-up tokens and blocks: one as large as they can get, one of every kind, one that uses the host
tier."""

from __future__ import annotations

from collections.abc import Sequence

from ..api import SamplingParams
from ..step import BlockCopy, BlockSwap, NewRow, ScheduledRow, StepPlan

STEP_ID = -1
MAX_SWAPPED_BLOCKS = 16
MAX_KEPT_TOKENS = 1 << 19
"""Most tokens that the rows of a made-up step of decodes have: the host has to write them all down."""


def largest_step(
    num_tokens: int,
    num_rows: int,
    *,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    num_groups: int = 1,
) -> StepPlan:
    """One long row, and ``num_rows - 1`` of one token; every row samples, by the dearest rules.

    Sequence ids are negative. All KV groups use the same blocks. Gets smaller where the pool or the window does not hold as much.
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
        rows.append(ScheduledRow(seq_id, 0, length, 1, (blocks,) * num_groups, 0))
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


def kernel_steps(
    *,
    max_num_tokens: int,
    max_num_seqs: int,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    num_groups: int = 1,
) -> list[StepPlan]:
    """Small and large steps of every kind that a GPU's kernels tell apart: decodes of few and many rows over
    short and long sequences, prompts, both together, greedy and filtered sampling, a copied block.

    Rows share the pool's first blocks: what they compute means nothing.
    """
    longest = min(max_model_len, num_blocks * block_size)
    lengths = sorted({min(length, longest) for length in (16, 512, 4096, longest)})
    counts = sorted({min(count, max_num_seqs) for count in (1, 8, 64, max_num_seqs)})
    sizes = sorted(
        {min(size, longest, max_num_tokens) for size in (2, 16, 64, 256, max_num_tokens)}
    )
    batches = [
        [(length, 1)] * count
        for count in counts
        for length in lengths
        if count * length <= MAX_KEPT_TOKENS
    ]
    batches += [[(size, size)] for size in sizes]
    batches += [[(longest, 1), (size, size)] for size in sizes if size < max_num_tokens]
    greedy = SamplingParams(temperature=0.0)
    steps = [_step_of(rows, block_size, num_groups, greedy) for rows in batches]
    filtered = (SamplingParams(temperature=1.0), SamplingParams(top_k=5, top_p=0.9, min_p=0.1))
    steps += [_step_of([(1, 1)], block_size, num_groups, sampling) for sampling in filtered]
    if num_blocks > 1:
        steps.append(StepPlan(STEP_ID, block_copies=(BlockCopy(0, 0, 1),)))
    return steps


def _step_of(
    rows: Sequence[tuple[int, int]], block_size: int, num_groups: int, sampling: SamplingParams
) -> StepPlan:
    """Rows of (sequence length, tokens to compute), all over the same blocks."""
    new_rows, scheduled = [], []
    for index, (seq_len, count) in enumerate(rows):
        blocks = list(range(-(-seq_len // block_size)))
        new_rows.append(NewRow(-1 - index, [0] * seq_len, (), sampling, 0))
        tables = (blocks,) * num_groups
        scheduled.append(ScheduledRow(-1 - index, seq_len - count, count, 1, tables, 0))
    return StepPlan(STEP_ID, new_rows=tuple(new_rows), rows=tuple(scheduled))
