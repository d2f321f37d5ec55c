"""A model's step in one native call: recorded once, replayed for every size, bit-equal in any company."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.engine.models.model import Model
from octavo.kernels.cpu_ops import CpuOps
from octavo.kernels.cpu_recording import Arena
from octavo.kernels.ops import AttentionMetadata, LayerKVCache, Ops
from octavo.kernels.select import select_ops

pytestmark = pytest.mark.native

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def native() -> CpuOps:
    ops = select_ops("cpu", CPU)
    assert isinstance(ops, CpuOps)
    return ops


class Row:
    """Tokens of one sequence to compute, after ``start`` that were computed before."""

    def __init__(self, tokens: list[int], start: int, blocks: list[int]) -> None:
        self.tokens, self.start, self.blocks = tokens, start, blocks


def inputs_of(rows: list[Row]) -> tuple[Tensor, Tensor, list[AttentionMetadata]]:
    """Token ids, positions and metadata of a step."""
    counts = [len(row.tokens) - row.start for row in rows]
    positions = torch.cat([torch.arange(r.start, len(r.tokens)) for r in rows])
    token_ids = torch.tensor([t for r in rows for t in r.tokens[r.start :]])
    slots = [
        r.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for r in rows
        for p in range(r.start, len(r.tokens))
    ]
    width = max(len(r.blocks) for r in rows)
    tables = [r.blocks + [r.blocks[0]] * (width - len(r.blocks)) for r in rows]
    begins = torch.tensor([0, *counts]).cumsum(0)
    metadata = AttentionMetadata(
        query_start_loc=begins.to(torch.int32),
        seq_lens=torch.tensor([len(r.tokens) for r in rows], dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        query_lens_host=counts,
        seq_lens_host=[len(r.tokens) for r in rows],
        max_query_len=max(counts),
        max_seq_len=max(len(r.tokens) for r in rows),
    )
    return token_ids, positions, [metadata]


def caches_of(model: Model, ops: Ops) -> list[LayerKVCache]:
    spec = model.kv_cache_spec(NUM_BLOCKS, BLOCK_SIZE)
    return [ops.allocate_kv_cache(spec, CPU) for _ in range(model.num_layers)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(
    request: pytest.FixtureRequest, native: CpuOps, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    from octavo.engine.checkpoint.checkpoint import open_checkpoint
    from octavo.engine.models.loader import load_model

    make: Callable[..., Any] = request.getfixturevalue("make_tiny")
    folder: Path = tmp_path_factory.mktemp("tiny")
    make("llama", head_dim=24).save_pretrained(folder)
    return load_model(open_checkpoint(str(folder)), native, dtype=request.param, device=CPU)


def test_a_replay_is_the_calls_one_by_one(native: CpuOps, model: Model) -> None:
    caches, others = caches_of(model, native), caches_of(model, native)
    replayed = native.record_step(lambda t, p, m: model.forward(t, p, caches, [*m] * NUM_LAYERS))
    for step in (
        [Row([1, 2, 3], 0, [5])],
        [Row([1, 2, 3, 4], 3, [5]), Row(list(range(20, 50)), 0, list(range(10, 18)))],
        [Row([1, 2, 3, 4, 9], 4, [5, 7])],
    ):
        inputs = inputs_of(step)
        expected = model.forward(inputs[0], inputs[1], others, inputs[2] * NUM_LAYERS)
        assert torch.equal(replayed(*inputs), expected)


def test_groups_of_layers_may_share_a_cache_and_have_tables_of_their_own(
    native: CpuOps, model: Model
) -> None:
    cache, others = caches_of(model, native)[0], caches_of(model, native)
    replayed = native.record_step(lambda t, p, m: model.forward(t, p, [cache, cache], m))
    for tokens, start in (([1, 2, 3], 0), (list(range(30)), 3), (list(range(31)), 30)):
        tables = [list(range(first, first + 2 * 8, 2)) for first in (8, 9)]
        steps = [inputs_of([Row(tokens, start, table)]) for table in tables]
        token_ids, positions, _ = steps[0]
        groups = [metadata for _, _, (metadata,) in steps]
        expected = model.forward(token_ids, positions, others, [groups[1]] * NUM_LAYERS)
        assert torch.equal(replayed(token_ids, positions, groups), expected)
    token_ids, positions, (narrow,) = inputs_of([Row([1], 0, [1])])
    _, _, (wide,) = inputs_of([Row([1], 0, [1, 2])])
    with pytest.raises(ValueError, match="block tables of"):
        replayed(token_ids, positions, [narrow, wide])


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_a_row_is_bit_equal_in_any_company_and_chunking(
    native: CpuOps, model: Model, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 95), min_size=1, max_size=40))
    blocks = list(range(len(tokens) // BLOCK_SIZE + 1))
    caches = caches_of(model, native)
    forward = native.record_step(lambda t, p, m: model.forward(t, p, caches, [*m] * NUM_LAYERS))
    alone = forward(*inputs_of([Row(tokens, 0, blocks)])).clone()
    moved = [NUM_BLOCKS - 1 - b for b in blocks]
    done = 0
    while done < len(tokens):
        end = data.draw(st.integers(done + 1, len(tokens)))
        rows = [Row(tokens[:end], done, moved)]
        for i in range(data.draw(st.integers(0, 3))):
            others = data.draw(st.lists(st.integers(0, 95), min_size=1, max_size=9))
            rows.append(Row(others, 0, [20 + 3 * i, 21 + 3 * i, 22 + 3 * i]))
        place = data.draw(st.integers(0, len(rows) - 1))
        rows[0], rows[place] = rows[place], rows[0]
        before = sum(len(r.tokens) - r.start for r in rows[:place])
        together = forward(*inputs_of(rows))
        assert torch.equal(together[before : before + end - done], alone[done:end])
        done = end


def test_threads_change_nothing(native: CpuOps, model: Model) -> None:
    caches = caches_of(model, native)
    inputs = inputs_of([Row(list(range(60)), 0, list(range(15))), Row([5], 0, [20])])
    num_threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(model.forward(inputs[0], inputs[1], caches, inputs[2] * NUM_LAYERS))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_arena_reuses_what_is_dead_and_never_what_is_alive() -> None:
    arena = Arena()
    first = arena.empty((4, 6))
    view = first[:, 2:]
    address = first.data_ptr()
    del first
    gc.collect()
    others = [arena.empty((4, 6))]
    del view
    others.append(arena.empty((4, 6)))  # no barrier since
    assert address not in [other.data_ptr() for other in others]
    arena.release()
    assert arena.empty((4, 6)).data_ptr() == address


def test_rows_that_are_no_float32_are_refused(native: CpuOps) -> None:
    with pytest.raises(ValueError, match="float32"):
        native.silu_and_mul(torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="strides"):
        native.silu_and_mul(torch.zeros(8, 2).T)
