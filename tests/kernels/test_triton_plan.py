"""How the Triton attention kernels share out a batch. Pure arithmetic: Triton is not needed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.triton_attention_plan import (
    AttentionPlan,
    SplitRule,
    TileShape,
    plan_attention,
)

PREFILL, DECODE = TileShape(16, 32), TileShape(4, 16)
SPLIT = SplitRule(min_keys=64, max_parts=8)


def _plan(rows: list[tuple[int, int]], window: int | None = None) -> AttentionPlan:
    return plan_attention(
        [count for _, count in rows],
        [seq_len for seq_len, _ in rows],
        prefill=PREFILL,
        decode=DECODE,
        split=SPLIT,
        window=window,
        device=torch.device("cpu"),
    )


@st.composite
def _rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    lengths = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=12))
    return [(n, draw(st.one_of(st.just(1), st.integers(1, n)))) for n in lengths]


@given(rows=_rows(), window=st.one_of(st.none(), st.integers(1, 500)))
def test_every_visible_pair_is_in_exactly_one_tile(
    rows: list[tuple[int, int]], window: int | None
) -> None:
    plan = _plan(rows, window)
    starts = np.cumsum([0, *(count for _, count in rows)])
    covered: dict[int, list[tuple[int, int]]] = {token: [] for token in range(starts[-1])}
    for shape, tiles in ((PREFILL, plan.prefill_tiles), (DECODE, plan.decode_tiles)):
        assert tiles.dtype == torch.int32
        for row, first, count, position, begin, end, _, _ in tiles.tolist():
            assert 1 <= count <= shape.num_tokens
            assert starts[row] <= first
            assert first + count <= starts[row + 1]
            assert position == rows[row][0] - rows[row][1] + first - starts[row]
            assert begin % shape.step == 0
            assert begin < end
            for token in range(first, first + count):
                covered[token].append((begin, end))
    for row, (seq_len, count) in enumerate(rows):
        for token in range(starts[row], starts[row + 1]):
            position = seq_len - count + token - int(starts[row])
            parts = sorted(covered[token])
            first_seen = 0 if window is None else max(0, position - window + 1)
            assert parts[0][0] <= first_seen
            assert parts[-1][1] > position
            assert all(a[1] == b[0] for a, b in pairwise(parts))


@given(rows=_rows(), window=st.one_of(st.none(), st.integers(1, 500)))
def test_partial_results_are_each_written_once_and_merged_once(
    rows: list[tuple[int, int]], window: int | None
) -> None:
    plan = _plan(rows, window)
    written: dict[int, int] = {}
    for _, first, count, _, begin, _, partial_row, is_first in plan.decode_tiles.tolist():
        assert is_first == (partial_row < 0) or begin % DECODE.step == 0
        if partial_row >= 0:
            for token in range(count):
                assert partial_row + token not in written
                written[partial_row + token] = first + token
    read: dict[int, int] = {}
    for token, partial_row, stride, num_splits, *_ in plan.merges.tolist():
        assert num_splits > 1
        for part in range(num_splits):
            read[partial_row + part * stride] = token
    assert read == written
    assert sorted(written) == list(range(plan.num_partial_rows))
    assert (plan.prefill_tiles[:, 6] == -1).all()


def test_every_row_has_one_first_part() -> None:
    plan = _plan([(1, 1), (1000, 2), (3000, 1), (40, 40)], window=700)
    for row in (0, 1, 2):
        tiles = plan.decode_tiles[plan.decode_tiles[:, 0] == row]
        assert tiles[tiles[:, 4].argmin(), 7] == 1
        assert tiles[:, 7].sum() == 1
    assert (plan.prefill_tiles[:, 7] == 1).all()


def test_a_short_row_beside_a_long_one_costs_its_own_length() -> None:
    tiles = _plan([(100_000, 1), *[(10, 1)] * 50]).decode_tiles
    assert len(tiles) == SPLIT.max_parts + 50
    short = tiles[tiles[:, 0] > 0]
    assert (short[:, 5] - short[:, 4] == 10).all()


def test_a_window_leaves_out_what_is_before_it() -> None:
    tiles = _plan([(100_000, 1), (5000, 40)], window=100)
    assert tiles.decode_tiles[:, 4].min() == (100_000 - 100) // 16 * 16
    keys = tiles.prefill_tiles[:, 5] - tiles.prefill_tiles[:, 4]
    assert keys.max() <= 100 + PREFILL.num_tokens + PREFILL.step


def test_long_tiles_come_first() -> None:
    plan = _plan([(100, 1), (60, 60), (500, 30), (3000, 1), (7, 1)])
    for tiles in (plan.prefill_tiles, plan.decode_tiles):
        keys = (tiles[:, 5] - tiles[:, 4]).tolist()
        assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize(
    ("num_keys", "num_parts"), [(64, 1), (65, 2), (128, 2), (500, 8), (513, 7), (100_000, 8)]
)
def test_number_of_parts_by_length(num_keys: int, num_parts: int) -> None:
    """At least 64 keys a part, at most 8 parts, whole steps of 16: 513 keys are 7 parts of 80."""
    plan = _plan([(num_keys, 1), (33, 1)])
    tiles = plan.decode_tiles[plan.decode_tiles[:, 0] == 0]
    assert len(tiles) == num_parts
    assert plan.num_partial_rows == (num_parts if num_parts > 1 else 0)


@given(rows=_rows())
def test_a_rows_tiles_do_not_depend_on_its_company(rows: list[tuple[int, int]]) -> None:
    together = _plan(rows)
    for row, one in enumerate(rows):
        alone = _plan([one])
        for tiles, own in (
            (together.prefill_tiles, alone.prefill_tiles),
            (together.decode_tiles, alone.decode_tiles),
        ):
            mine = tiles[tiles[:, 0] == row]
            assert torch.equal(mine[:, 2:6], own[:, 2:6])
