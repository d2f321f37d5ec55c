"""KV memory as the scheduler sees it: give a sequence room, take it back, know what is wasted.

Owns the block pool and every live sequence's block tables. Must not know requests, policies or tensors.
"""

from __future__ import annotations

from collections import Counter

from .block_pool import BlockPool, MemoryInvariantError
from .block_table import SequenceBlocks


def num_blocks_needed(num_prompt_tokens: int, max_tokens: int, n: int, block_size: int) -> int:
    """KV blocks of a prompt with ``n`` continuations: full prompt blocks are shared, the rest is not."""
    shared = num_prompt_tokens // block_size
    return shared + n * (-(-(num_prompt_tokens + max_tokens) // block_size) - shared)


class KVCacheManager:
    """Block tables over one pool.

    Tables grow a block at a time, when the token that needs it is scheduled (Kwon et al., 2023,
    section 4.2), so a sequence never holds more than one partly filled block.

    Args:
        num_blocks: physical blocks, shared by all groups.
        block_size: tokens in a block.
        num_groups: sets of layers with equal retention; one for models with one kind of attention.
    """

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_groups = num_groups
        self.num_used_slots = 0
        self._sequences: dict[int, SequenceBlocks] = {}

    @property
    def num_allocated_slots(self) -> int:
        """Slots of all used blocks. Minus ``num_used_slots``, it is the memory wasted."""
        return self.pool.num_used_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def open(self, seq_id: int) -> SequenceBlocks:
        """Start a sequence with empty tables."""
        if seq_id in self._sequences:
            raise MemoryInvariantError(f"sequence {seq_id} has block tables already")
        blocks = SequenceBlocks(self.num_groups)
        self._sequences[seq_id] = blocks
        return blocks

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens in all; ``False``, and no change, if blocks run out."""
        if num_tokens <= blocks.num_slots:
            return True
        missing = -(-num_tokens // self.block_size) - len(blocks.tables[0])
        taken = self.pool.allocate(missing * self.num_groups)
        if taken is None:
            return False
        for group, table in enumerate(blocks.tables):
            table.extend(taken[group * missing : (group + 1) * missing])
        blocks.num_slots += missing * self.block_size
        return True

    def mark_computed(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Note that positions up to ``num_tokens - 1`` are filled."""
        self.num_used_slots += (num_tokens - blocks.num_tokens) * self.num_groups
        blocks.num_tokens = num_tokens

    def close(self, seq_id: int) -> None:
        """End a sequence; blocks that nobody else refers to are free at once."""
        blocks = self._sequences.pop(seq_id)
        self.num_used_slots -= blocks.num_tokens * self.num_groups
        for table in blocks.tables:
            self.pool.release(table)

    def check(self) -> None:
        """Verify every invariant of pool and tables. O(blocks + table entries).

        Raises:
            MemoryInvariantError: one is broken; the message says which.
        """
        self.pool.check()
        references: Counter[int] = Counter()
        used_slots = 0
        for seq_id, blocks in self._sequences.items():
            self._check_sequence(seq_id, blocks)
            for table in blocks.tables:
                references.update(table)
            used_slots += blocks.num_tokens * self.num_groups
        for block_id, count in enumerate(self.pool.ref_counts):
            if references[block_id] != count:
                seen = references[block_id]
                raise MemoryInvariantError(
                    f"block {block_id} has {count} references and stands in {seen} block tables"
                )
        if used_slots != self.num_used_slots:
            raise MemoryInvariantError(
                f"{used_slots} slots hold tokens, {self.num_used_slots} are counted"
            )

    def _check_sequence(self, seq_id: int, blocks: SequenceBlocks) -> None:
        for table in blocks.tables:
            if len(table) * self.block_size != blocks.num_slots:
                raise MemoryInvariantError(f"sequence {seq_id}: table length and slots disagree")
            if len(set(table)) != len(table):
                raise MemoryInvariantError(f"sequence {seq_id} sees one block at two positions")
        if not 0 <= blocks.num_tokens <= blocks.num_slots:
            raise MemoryInvariantError(
                f"sequence {seq_id}: {blocks.num_tokens} tokens in {blocks.num_slots} slots"
            )
