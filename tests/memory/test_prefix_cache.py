"""What is findable, for whom, and what becomes of it when its memory is wanted."""

from __future__ import annotations

import pytest

from octavo.engine.memory.block_hash import HashChain, group_of, hash_block, in_group, root_hash
from octavo.engine.memory.block_table import SequenceBlocks
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.memory.prefix_cache import PrefixMatch
from octavo.engine.step import BlockCopy, BlockSwap

TOKENS = list(range(100, 140))


class Tape:
    """One manager, driven by hand as the scheduler would."""

    def __init__(self, num_blocks: int = 16, block_size: int = 8, num_host_blocks: int = 0) -> None:
        self.memory = KVCacheManager(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.copies: list[BlockCopy] = []

    def chain(self, salt: str | None = None) -> HashChain:
        return HashChain(root_hash(salt))

    def match(self, tokens: list[int], salt: str | None = None) -> PrefixMatch:
        return self.memory.match(self.chain(salt), tokens, len(tokens))

    def begin(self, seq_id: int, tokens: list[int], salt: str | None = None) -> SequenceBlocks:
        """Admit a sequence and schedule all of it."""
        match = self.match(tokens, salt)
        blocks = self.memory.open(seq_id, self.chain(salt))
        self.copies = self.memory.attach(blocks, match, tokens)
        assert self.memory.grow(blocks, len(tokens))
        self.memory.publish(blocks, tokens, min(match.num_tokens, len(tokens) - 1), len(tokens))
        return blocks

    def commit(self, *sequences: tuple[SequenceBlocks, list[int]]) -> None:
        self.memory.commit()
        for blocks, tokens in sequences:
            self.memory.mark_computed(blocks, len(tokens))
            self.memory.publish_tail(blocks, tokens)
        self.memory.check()

    def swap_out(self, blocks: SequenceBlocks, tokens: list[int]) -> list[int] | None:
        return self.memory.swap_out([(blocks, tokens)], self.memory.swappable_blocks([blocks]))

    def run(self, seq_id: int, tokens: list[int], salt: str | None = None) -> list[int]:
        """A whole life; returns the blocks it had."""
        blocks = self.begin(seq_id, tokens, salt)
        self.commit((blocks, tokens))
        table = list(blocks.tables[0])
        self.memory.close(seq_id, tokens)
        self.memory.check()
        return table


def test_names_depend_on_tokens_parent_and_salt() -> None:
    root, salted = root_hash(None), root_hash("a")
    names = {
        hash_block(root, [1, 2]),
        hash_block(root, [2, 1]),
        hash_block(root, [1]),
        hash_block(salted, [1, 2]),
        hash_block(hash_block(root, [1, 2]), [1, 2]),
        in_group(hash_block(root, [1, 2]), 1),
        root,
        salted,
    }
    assert len(names) == 8
    assert root_hash("") != root_hash(None)
    assert hash_block(in_group(root, 3), [1, 2]) == in_group(hash_block(root, [1, 2]), 3)
    assert (group_of(root), group_of(in_group(root, 300))) == (0, 300)


def test_blocks_stay_findable_after_their_sequence() -> None:
    t = Tape()
    table = t.run(0, TOKENS[:20])
    assert t.memory.pool.num_used_blocks == 0
    match = t.match([*TOKENS[:16], 1, 2, 3])
    assert match.device_block_ids == (tuple(table[:2]),)
    assert match.num_tokens == 16
    assert t.match([*TOKENS[:15], 1]).num_tokens == 8 + 7


def test_salts_do_not_meet() -> None:
    t = Tape()
    t.run(0, TOKENS[:22], "a")
    assert t.match(TOKENS[:22]).num_tokens == 0
    assert t.match(TOKENS[:22], "b").num_tokens == 0
    assert t.match(TOKENS[:22], "a").num_tokens == 21


def test_requests_that_arrive_together_share_whole_blocks_only() -> None:
    t = Tape()
    first = t.begin(0, TOKENS[:20])
    second = t.begin(1, TOKENS[:20])
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2]
    assert second.num_tokens == 16
    t.commit((first, TOKENS[:20]), (second, TOKENS[:20]))


def test_a_writer_that_leaves_the_plan_takes_its_blocks_out_of_sight() -> None:
    t = Tape()
    t.begin(0, TOKENS[:20])
    assert t.match(TOKENS[:20]).num_tokens == 16
    t.memory.close(0, TOKENS[:20])
    assert t.match(TOKENS[:20]).num_tokens == 0
    t.commit()


@pytest.mark.parametrize(("agree", "found"), [(3, 0), (4, 4), (7, 7)])
def test_a_hit_inside_a_block_saves_at_least_four_tokens(agree: int, found: int) -> None:
    t = Tape()
    table = t.run(0, TOKENS[:8])
    prompt = [*TOKENS[:agree], *[1] * 9]
    match = t.match(prompt)
    assert (match.num_tokens, match.num_inside_tokens) == (found, found)
    blocks = t.begin(1, prompt)
    copies = [(c.src_block_id, c.dst_block_id) for c in t.copies]
    assert copies == ([(table[0], blocks.tables[0][0])] if found else [])
    assert table[0] not in blocks.tables[0] or not found
    t.commit((blocks, prompt))


def test_a_half_full_last_block_is_found_and_one_token_is_left_to_compute() -> None:
    t = Tape()
    t.run(0, TOKENS[:14])
    assert t.match(TOKENS[:14]).num_tokens == 13
    assert t.match(TOKENS[:30]).num_tokens == 14


def test_a_full_hit_is_shared_with_all_its_tokens() -> None:
    t = Tape()
    table = t.run(0, TOKENS[:16])
    match = t.match(TOKENS[:16])
    assert (match.num_tokens, match.device_block_ids) == (16, (tuple(table),))


def test_the_source_of_a_hit_inside_a_block_is_not_used_anew_before_the_copy() -> None:
    t = Tape(num_blocks=3)
    table = t.run(0, TOKENS[:8])
    prompt = [*TOKENS[:6], *[1] * 9]
    assert t.memory.num_blocks_taken(t.match(prompt), len(prompt)) == 3
    blocks = t.begin(1, prompt)
    assert table[0] not in blocks.tables[0]
    assert not t.memory.grow(blocks, 24)
    t.commit((blocks, prompt))
    assert t.memory.grow(blocks, 24)


def test_untouched_memory_is_used_before_anything_is_evicted() -> None:
    t = Tape(num_blocks=6)
    t.run(0, TOKENS[:16])
    t.run(1, [1] * 32)
    assert t.memory.cache.num_evictions == 0
    assert t.match(TOKENS[:17]).num_tokens == 16


def test_eviction_takes_the_least_recently_used_and_a_sequences_deepest_block_first() -> None:
    t = Tape(num_blocks=4)
    old, new = TOKENS[:16], [1] * 16
    t.run(0, old)
    t.run(1, new)
    t.run(2, [2] * 5)
    assert t.match([*old, 0]).num_tokens == 8
    assert t.match([*new, 0]).num_tokens == 16
    t.run(3, [*old[:8], 3])  # a hit makes it recent
    t.run(4, [4] * 13)
    assert t.match([*old, 0]).num_tokens >= 8
    assert t.match([*new, 0]).num_tokens < 16


def test_a_thousand_prompts_leave_no_more_entries_than_blocks() -> None:
    t = Tape(num_blocks=8, num_host_blocks=4)
    for i in range(1000):
        t.run(i, [i % 251, *range(i, i + 20)])
        t.memory.take_swaps()
        index = t.memory.cache.index
        assert len(index) <= 8
        assert len(index._by_name) <= 8
        assert len(index._by_first_tokens) <= 8
    assert t.match([0, *range(20)]).num_tokens == 0


def test_an_evicted_prefix_comes_back_from_the_host_tier() -> None:
    t = Tape(num_blocks=2, num_host_blocks=4)
    (block,) = t.run(0, TOKENS[:8])
    t.run(1, [1] * 16)
    (swap,) = t.memory.take_swaps()
    assert swap == BlockSwap(0, block, swap.host_block_id, to_host=True)
    match = t.match([*TOKENS[:8], 5])
    assert (match.num_tokens, match.num_host_tokens) == (8, 8)
    blocks = t.begin(2, [*TOKENS[:8], 5])
    (back,) = [s for s in t.memory.take_swaps() if not s.to_host]
    assert back == BlockSwap(0, blocks.tables[0][0], swap.host_block_id, to_host=False)
    t.commit((blocks, [*TOKENS[:8], 5]))
    assert t.match([*TOKENS[:8], 5]).num_host_tokens == 0


def test_the_host_tier_never_drops_what_a_preempted_sequence_needs() -> None:
    t = Tape(num_blocks=6, num_host_blocks=3)
    tokens = TOKENS[:20]
    blocks = t.begin(0, tokens)
    t.commit((blocks, tokens))
    held = t.swap_out(blocks, tokens)
    assert held is not None
    assert len(held) == 3
    t.memory.close(0, tokens)
    for i in range(1, 6):
        t.run(i, [i] * 40)
    t.memory.take_swaps()
    match = t.memory.match(t.chain(), tokens, len(tokens), num_swapped=20)
    assert (match.num_tokens, match.num_host_tokens) == (20, 20)
    t.memory.swap_done(held)
    t.memory.check()


def test_without_room_in_the_host_tier_nothing_is_swapped() -> None:
    t = Tape(num_blocks=6, num_host_blocks=2)
    tokens = TOKENS[:20]
    blocks = t.begin(0, tokens)
    t.commit((blocks, tokens))
    assert t.swap_out(blocks, tokens) is None
    assert t.memory.take_swaps() == ()
    t.memory.check()


def test_blocks_shared_with_others_are_not_moved() -> None:
    t = Tape(num_blocks=8, num_host_blocks=8)
    first, second = [*TOKENS[:16], 1], [*TOKENS[:16], 2]
    mine, theirs = t.begin(0, first), t.begin(1, second)
    t.commit((mine, first), (theirs, second))
    held = t.swap_out(mine, first)
    assert held is not None
    assert len(held) == 1
    (swap,) = t.memory.take_swaps()
    assert swap.device_block_id == mine.tables[0][2]


def test_reset_forgets_everything_and_takes_nothing_from_those_who_run() -> None:
    t = Tape(num_host_blocks=4)
    t.run(0, [9] * 16)
    blocks = t.begin(1, TOKENS[:20])
    t.commit((blocks, TOKENS[:20]))
    t.memory.reset_prefix_cache()
    t.memory.check()
    assert t.match(TOKENS[:20]).num_tokens == 0
    assert t.match([9] * 16).num_tokens == 0
    assert len(t.memory.cache.index) == 0
    assert t.memory.num_used_slots == 20


def test_a_failed_sequence_is_found_by_nobody() -> None:
    t = Tape()
    blocks = t.begin(0, TOKENS[:20])
    t.commit((blocks, TOKENS[:20]))
    t.memory.forget(blocks)
    t.memory.close(0)
    assert t.match(TOKENS[:20]).num_tokens == 0
    assert len(t.memory.cache.index) == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    memory = KVCacheManager(4, 8, enable_prefix_caching=False)
    blocks = memory.open(0)
    memory.grow(blocks, 16)
    memory.publish(blocks, TOKENS, 0, 16)
    memory.mark_computed(blocks, 16)
    memory.close(0, TOKENS[:16])
    memory.check()
    assert memory.match(HashChain(root_hash(None)), TOKENS, 16) == PrefixMatch()
    assert len(memory.cache.index) == 0


def test_windows_need_to_know_how_long_steps_are() -> None:
    with pytest.raises(ValueError, match="tokens of a step"):
        KVCacheManager(4, 8, (None, 16))


def test_times_of_evicted_blocks_are_counted() -> None:
    t = Tape(num_blocks=2)
    t.run(0, TOKENS[:8])
    t.memory.times.now = 3.0
    t.run(1, [1] * 16)
    lifetimes = t.memory.times.lifetimes.counts()
    assert sum(lifetimes.counts) == 1
    assert lifetimes.total_s == 3.0
    assert t.memory.times.lifetimes.counts() is lifetimes
