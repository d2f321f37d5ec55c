"""Groups of layers over one pool: what a window gives back, what a hit needs, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.memory.block_demand import BlockDemand, first_block
from octavo.engine.memory.block_hash import HashChain, in_group, root_hash
from octavo.engine.memory.block_pool import MemoryInvariantError
from octavo.engine.memory.block_table import SequenceBlocks
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.memory.prefix_cache import PrefixMatch

SIZE, WINDOW, STEP = 4, 10, 8
TOKENS = list(range(100, 164))


class Tape:
    """A full and a windowed group, driven by hand as the scheduler would."""

    def __init__(self, num_blocks: int = 64, num_host_blocks: int = 0) -> None:
        self.memory = KVCacheManager(
            num_blocks,
            SIZE,
            (None, WINDOW),
            num_host_blocks=num_host_blocks,
            max_step_tokens=STEP,
        )

    def match(self, tokens: list[int], num_swapped: int = 0) -> PrefixMatch:
        return self.memory.match(HashChain(root_hash(None)), tokens, len(tokens), num_swapped)

    def compute(self, seq_id: int, tokens: list[int]) -> SequenceBlocks:
        """Everything that is not found, in steps of ``STEP`` tokens."""
        match = self.match(tokens)
        blocks = self.memory.open(seq_id, HashChain(root_hash(None)))
        self.memory.attach(blocks, match, tokens)
        start = min(match.num_tokens, len(tokens) - 1)
        while start < len(tokens):
            end = min(start + STEP, len(tokens))
            assert self.memory.grow(blocks, end)
            self.memory.publish(blocks, tokens, start, end)
            self.memory.commit()
            self.memory.mark_computed(blocks, end)
            self.memory.check()
            start = end
        return blocks

    def forget(self, tokens: list[int], index: int, group: int) -> None:
        """As if the block's memory had been taken."""
        name = HashChain(root_hash(None)).hash_of(index, tokens, SIZE)
        block_id = self.memory.cache.index.find(in_group(name, group))
        assert block_id is not None
        self.memory.cache.forget(block_id)


def test_a_windowed_group_has_the_blocks_of_its_last_tokens() -> None:
    t = Tape()
    blocks = t.compute(0, TOKENS[:30])
    assert len(blocks.held(0)) == 8
    assert blocks.first_blocks == [0, (30 - WINDOW) // SIZE]
    assert len(blocks.held(1)) == 8 - 5
    assert t.memory.pool.num_used_blocks == 8 + 3
    t.memory.close(0)
    assert t.memory.pool.num_used_blocks == 0
    t.memory.check()


def test_a_hit_needs_only_the_windows_blocks_of_a_windowed_group() -> None:
    t = Tape()
    t.compute(0, TOKENS[:32])
    t.memory.close(0)
    for index in range((32 - WINDOW) // SIZE):
        t.forget(TOKENS, index, 1)
    match = t.match(TOKENS[:40])
    assert match.num_tokens == 32
    assert match.first_blocks == (0, 5)
    assert [len(ids) for ids in match.device_block_ids] == [8, 3]
    blocks = t.compute(1, TOKENS[:40])
    assert blocks.num_tokens == 40


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ([(1, 6)], 24),  # in the window of 32 and of 28; the window of 24 begins at block 3
        ([(1, 6), (1, 4)], 16),
        ([(0, 6)], 24),
        ([(0, 0)], 0),
        ([(1, 0)], 32),
        ([(1, 7)], 28),
        ([(1, 7), (1, 3), (0, 6)], 12),
    ],
)
def test_a_hit_is_as_long_as_all_groups_can_serve(
    missing: list[tuple[int, int]], found: int
) -> None:
    t = Tape()
    t.compute(0, TOKENS[:32])
    t.memory.close(0)
    for group, index in missing:
        t.forget(TOKENS, index, group)
    assert t.match([*TOKENS[:32], 1]).num_tokens == found


def test_a_hit_inside_a_block_needs_one_in_every_group() -> None:
    memory = KVCacheManager(64, 8, (None, WINDOW), max_step_tokens=64)
    chain = HashChain(root_hash(None))
    blocks = memory.open(0, chain)
    memory.grow(blocks, 24)
    memory.publish(blocks, TOKENS, 0, 24)
    memory.commit()
    memory.mark_computed(blocks, 24)
    memory.close(0)
    asked = [*TOKENS[:21], 1, 2, 3]
    match = memory.match(HashChain(root_hash(None)), asked, len(asked))
    assert (match.num_tokens, match.num_inside_tokens, len(match.copied_block_ids)) == (21, 5, 2)
    other = memory.open(1, HashChain(root_hash(None)))
    copies = memory.attach(other, match, asked)
    assert [copy.group for copy in copies] == [0, 1]
    assert other.first_blocks == [0, first_block(21, WINDOW, 8)]
    memory.commit()
    memory.check()
    name = chain.hash_of(2, TOKENS, 8)
    third = memory.cache.index.find(in_group(name, 1))
    assert third is not None
    memory.cache.forget(third)
    memory.close(1)
    assert memory.match(HashChain(root_hash(None)), asked, len(asked)).num_tokens == 16


def test_groups_do_not_find_each_others_blocks() -> None:
    t = Tape()
    blocks = t.compute(0, TOKENS[:8])
    first, second = blocks.tables
    t.memory.close(0)
    match = t.match([*TOKENS[:8], 1])
    assert match.device_block_ids == (tuple(first), tuple(second))
    assert set(first).isdisjoint(second)


def test_nothing_forks_from_blocks_that_are_gone() -> None:
    t = Tape()
    blocks = t.compute(0, TOKENS[:30])
    with pytest.raises(MemoryInvariantError, match="gone"):
        t.memory.fork(blocks, 1, 20)
    child = t.memory.fork(blocks, 1, 30)
    assert child.first_blocks == blocks.first_blocks
    t.memory.check()
    assert t.memory.pool.num_used_blocks == 11
    assert t.memory.pool.num_shared_blocks == 11


def test_a_swap_moves_what_the_groups_have_and_brings_it_back() -> None:
    t = Tape(num_host_blocks=16)
    tokens = TOKENS[:30]
    blocks = t.compute(0, tokens)
    own = t.memory.swappable_blocks([blocks])
    assert len(own) == 11
    held = t.memory.swap_out([(blocks, tokens)], own)
    assert held is not None
    swaps = t.memory.take_swaps()
    assert sorted(swap.group for swap in swaps) == [0] * 8 + [1] * 3
    t.memory.close(0)
    t.memory.reset_prefix_cache()
    match = t.match(tokens, num_swapped=30)
    assert (match.num_tokens, match.num_host_tokens) == (30, 30)
    assert match.first_blocks == (0, 5)
    assert len(match.host_tail_ids) == 2
    back = t.memory.open(1, HashChain(root_hash(None)))
    t.memory.attach(back, match, tokens)
    assert sorted(swap.group for swap in t.memory.take_swaps()) == [0] * 8 + [1] * 3
    t.memory.swap_done(held, [back])
    t.memory.commit()
    t.memory.check()


def test_tokens_before_a_window_are_lost_with_it() -> None:
    memory = KVCacheManager(64, SIZE, (WINDOW,), max_step_tokens=64)
    blocks = memory.open(0)
    memory.grow(blocks, 30)
    memory.mark_computed(blocks, 30)
    own = memory.swappable_blocks([blocks])
    assert len(own) == 3
    assert memory.num_uncached_tokens([blocks], own) == 30


def test_check_sees_a_block_that_was_not_given_back_and_one_given_back_too_early() -> None:
    for change in (-1, 1):
        t = Tape()
        blocks = t.compute(0, TOKENS[:30])
        blocks.first_blocks[1] += change
        with pytest.raises(MemoryInvariantError, match=f"with a window of {WINDOW}"):
            t.memory._check_sequence(0, blocks)


def test_a_failed_sequence_is_not_found_where_it_fell_out_of_a_window_either() -> None:
    t = Tape()
    blocks = t.compute(0, TOKENS[:32])
    t.memory.forget(blocks)
    t.memory.close(0)
    assert len(t.memory.cache.index) == 0


@given(
    acts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60),
    block_size=st.integers(1, 16),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 30)), min_size=1, max_size=3),
)
def test_any_order_of_growing_forking_and_closing_keeps_the_invariants(
    acts: list[tuple[int, int]], block_size: int, windows: list[int | None]
) -> None:
    memory = KVCacheManager(20, block_size, windows, max_step_tokens=40)
    live: dict[int, SequenceBlocks] = {}
    for seq_id, num_tokens in acts:
        if seq_id not in live and live and num_tokens % 2:
            parent = live[min(live)]
            live[seq_id] = memory.fork(parent, seq_id, parent.num_tokens)
        elif seq_id not in live:
            live[seq_id] = memory.open(seq_id)
        elif num_tokens == 0:
            memory.close(seq_id)
            del live[seq_id]
        elif (
            num_tokens > live[seq_id].num_tokens
            and memory.make_writable(live[seq_id], live[seq_id].num_tokens) is not None
            and memory.grow(live[seq_id], num_tokens)
        ):
            memory.commit()
            memory.mark_computed(live[seq_id], num_tokens)
        memory.commit()
        memory.check()
    for seq_id in live:
        memory.close(seq_id)
    memory.check()
    assert memory.num_allocated_slots == memory.num_used_slots == 0


@given(
    window=st.integers(1, 40),
    block_size=st.integers(1, 16),
    start=st.integers(0, 100),
    count=st.integers(1, 30),
    num_inside=st.integers(0, 15),
)
def test_a_step_never_holds_more_of_a_window_than_promised(
    window: int, block_size: int, start: int, count: int, num_inside: int
) -> None:
    first = first_block(start, window, block_size)
    end = start + min(num_inside, block_size - 1) + count
    held = -(-end // block_size) - first
    assert held <= BlockDemand(block_size, (window,), count).in_window(window, 1)


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    demand = BlockDemand(SIZE, (None, WINDOW), STEP)
    for num_blocks in range(2, 40):
        longest = demand.longest_sequence(num_blocks, 1000)
        assert demand.of_sequence(longest) <= num_blocks < demand.of_sequence(longest + 1)
    assert demand.longest_sequence(10**6, 1000) == 1000
    assert demand.longest_sequence(1, 1000) == 0
    assert BlockDemand(SIZE).longest_sequence(7, 1000) == 28
