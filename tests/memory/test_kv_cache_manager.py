from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.memory.block_pool import BlockPool, MemoryInvariantError
from octavo.engine.memory.kv_cache_manager import KVCacheManager


def test_pool_hands_out_each_block_once() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free_blocks == 1
    assert pool.allocate(1) == [3]
    assert pool.allocate(0) == []


def test_shared_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.share([block])
    pool.release([block])
    assert pool.num_used_blocks == 1
    pool.release([block])
    assert pool.num_used_blocks == 0
    pool.check()


@pytest.mark.parametrize("act", ["share", "release"])
def test_free_block_can_be_neither_shared_nor_released(act: str) -> None:
    with pytest.raises(MemoryInvariantError, match="block 1"):
        getattr(BlockPool(2), act)([1])


def test_released_blocks_are_used_before_untouched_ones() -> None:
    pool = BlockPool(100)
    first = pool.allocate(3) or []
    pool.release(first)
    assert set(pool.allocate(3) or []) == set(first)


def test_grow_takes_only_missing_blocks_and_nothing_on_failure() -> None:
    memory = KVCacheManager(3, 4)
    blocks = memory.open(7)
    assert memory.grow(blocks, 4)
    assert memory.grow(blocks, 5)
    assert len(blocks.tables[0]) == 2
    assert not memory.grow(blocks, 13)
    assert len(blocks.tables[0]) == 2
    memory.check()
    memory.close(7)
    assert memory.pool.num_used_blocks == 0


def test_groups_grow_together() -> None:
    memory = KVCacheManager(6, 4, (None, None))
    blocks = memory.open(0)
    assert memory.grow(blocks, 5)
    assert [len(table) for table in blocks.tables] == [2, 2]
    assert memory.pool.num_used_blocks == 4
    memory.mark_computed(blocks, 5)
    assert memory.num_used_slots == 10
    memory.check()
    assert not memory.grow(blocks, 13)


def broken(memory: KVCacheManager, how: str) -> None:
    blocks = memory.open(0)
    memory.grow(blocks, 8)
    other = memory.open(1)
    memory.grow(other, 4)
    if how == "foreign block":
        other.tables[0][0] = blocks.tables[0][0]
    elif how == "twice in a table":
        blocks.tables[0][1] = blocks.tables[0][0]
    elif how == "lost count":
        memory.pool.ref_counts[blocks.tables[0][0]] = 2
    elif how == "free and used":
        memory.pool._free.append(blocks.tables[0][0])
    elif how == "free twice":
        memory.pool._free.append(memory.pool._free[0])
    elif how != "none":
        break_sums_or_cache(memory, how)


def break_sums_or_cache(memory: KVCacheManager, how: str) -> None:
    blocks, other = memory._sequences[0], memory._sequences[1]
    if how == "cached and unknown":
        memory.pool.set_cached(blocks.tables[0][0], True)
    elif how == "shared count":
        memory.pool.num_shared_blocks += 1
    elif how == "references":
        memory.pool.num_references += 1
    elif how == "host block twice":
        memory.cache.host._free.append(0)
    elif how == "findable and empty":
        memory.publish(other, [1, 2, 3, 4], 0, 4)
        memory.commit()
    elif how == "wrong name":
        memory.mark_computed(other, 4)
        memory.publish(other, [1, 2, 3, 4], 0, 4)
        memory.commit()
        entry = memory.cache.index._blocks[other.tables[0][0]]
        memory.cache.index._blocks[other.tables[0][0]] = entry._replace(token_ids=(1, 2, 3, 5))
    elif how == "slots":
        blocks.num_slots += 1
    elif how == "too many tokens":
        blocks.num_tokens = 9
    elif how == "waste":
        memory.pool.num_used_slots += 1


@pytest.mark.parametrize(
    "how",
    [
        "foreign block",
        "twice in a table",
        "lost count",
        "free and used",
        "free twice",
        "cached and unknown",
        "shared count",
        "references",
        "host block twice",
        "findable and empty",
        "wrong name",
        "slots",
        "too many tokens",
        "waste",
    ],
)
def test_check_sees_every_kind_of_damage(how: str) -> None:
    memory = KVCacheManager(8, 4)
    broken(memory, "none")
    memory.check()
    memory = KVCacheManager(8, 4, num_host_blocks=2)
    broken(memory, how)
    with pytest.raises(MemoryInvariantError):
        memory.check()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60), st.integers(1, 16))
def test_any_order_of_growing_and_closing_keeps_the_invariants(
    acts: list[tuple[int, int]], block_size: int
) -> None:
    memory = KVCacheManager(12, block_size)
    live = {}
    for seq_id, num_tokens in acts:
        if seq_id not in live:
            live[seq_id] = memory.open(seq_id)
        if num_tokens == 0:
            memory.close(seq_id)
            del live[seq_id]
        elif memory.grow(live[seq_id], num_tokens):
            memory.mark_computed(live[seq_id], max(num_tokens, live[seq_id].num_tokens))
        memory.check()
    for seq_id in live:
        memory.close(seq_id)
    memory.check()
    assert memory.num_allocated_slots == memory.num_used_slots == 0
