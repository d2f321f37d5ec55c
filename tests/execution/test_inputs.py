"""From a plan to flat tensors."""

from __future__ import annotations

import torch

from octavo.engine.api import SamplingParams
from octavo.engine.execution.inputs import build_inputs
from octavo.engine.execution.rows import RowTable
from octavo.engine.execution.transfer import Transfer
from octavo.engine.step import NewRow, ScheduledRow, StepPlan


def test_a_mixed_plan_by_hand() -> None:
    table = RowTable(
        max_num_rows=4,
        max_model_len=20,
        block_size=4,
        num_blocks=50,
        vocab_size=1000,
        eos_token_ids=(),
    )
    tokens = {10: list(range(100, 106)), 11: [7, 8, 9], 12: list(range(200, 209))}
    news = tuple(NewRow(seq_id, ids, (), SamplingParams(), 0) for seq_id, ids in tokens.items())
    rows = (
        ScheduledRow(10, 2, 3, 0, ([40, 41],), 0),
        ScheduledRow(11, 2, 1, 1, ([5],), 0),
        ScheduledRow(12, 7, 2, 1, ([30, 20, 10],), 0, num_unwritten=1),
    )
    plan = StepPlan(0, new_rows=news, rows=rows)
    table.apply(plan)
    inputs = build_inputs(plan.rows, table, Transfer(torch.device("cpu")))
    (metadata,) = inputs.metadata
    # The decode of sequence 11 comes first; the others keep their order.
    assert inputs.token_ids.tolist() == [9, 102, 103, 104, 207, 208]
    assert inputs.positions.tolist() == [2, 2, 3, 4, 7, 8]
    assert metadata.slot_mapping.tolist() == [22, 162, 163, 164, -1, 40]
    assert metadata.query_start_loc.tolist() == [0, 1, 4, 6]
    assert metadata.seq_lens.tolist() == list(metadata.seq_lens_host) == [3, 5, 9]
    assert list(metadata.query_lens_host) == [1, 3, 2]
    assert metadata.block_tables.tolist() == [[5, 5, 5], [40, 41, 41], [30, 20, 10]]
    assert (metadata.max_query_len, metadata.max_seq_len) == (3, 9)
    assert metadata.num_decode_rows == 1
    assert inputs.last_tokens.tolist() == [3, 0, 5]  # in the plan's order
    assert inputs.token_ids.dtype == inputs.positions.dtype == torch.int64
    assert metadata.block_tables.dtype == metadata.seq_lens.dtype == torch.int32
    assert metadata.slot_mapping.dtype == torch.int64
