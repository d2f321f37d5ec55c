"""KV memory as the scheduler sees it: give a sequence room, take it back, know what is wasted.

Owns the block pool and every live sequence's block tables. Must not know requests, policies or tensors.
"""

from __future__ import annotations

from collections import Counter

from ..step import BlockCopy
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
        """Slots that hold a token; those of a shared block count once."""
        self._num_filled = [0] * num_blocks
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
        size, num_filled = self.block_size, self._num_filled
        for index in range(blocks.num_tokens // size, (num_tokens - 1) // size + 1):
            filled = min(size, num_tokens - index * size)
            for table in blocks.tables:
                block_id = table[index]
                if filled > num_filled[block_id]:
                    self.num_used_slots += filled - num_filled[block_id]
                    num_filled[block_id] = filled
        blocks.num_tokens = num_tokens

    def fork(self, parent: SequenceBlocks, seq_id: int, num_tokens: int) -> SequenceBlocks:
        """Start a sequence that sees the first ``num_tokens`` tokens of another.

        Every block is shared, a half-full last one too (Kwon et al., 2023, section 4.4).
        """
        num_blocks = -(-num_tokens // self.block_size)
        blocks = self.open(seq_id)
        for mine, theirs in zip(blocks.tables, parent.tables, strict=True):
            mine.extend(theirs[:num_blocks])
            self.pool.share(mine)
        blocks.num_slots = num_blocks * self.block_size
        blocks.num_tokens = num_tokens
        return blocks

    def make_writable(self, blocks: SequenceBlocks, position: int) -> list[BlockCopy] | None:
        """Before ``position`` is written: give the sequence blocks of its own there (copy-on-write).

        The last owner of a block keeps it. The sources are pinned until :meth:`unpin`.

        Returns:
            Copies to execute before the write; ``None``, and no change, if blocks run out.
        """
        index, offset = divmod(position, self.block_size)
        if index >= len(blocks.tables[0]):
            return []
        ref_counts = self.pool.ref_counts
        shared = [g for g, table in enumerate(blocks.tables) if ref_counts[table[index]] > 1]
        taken = self.pool.allocate(len(shared))
        if taken is None:
            return None
        copies = []
        for group, block_id in zip(shared, taken, strict=True):
            table = blocks.tables[group]
            copies.append(BlockCopy(group, table[index], block_id))
            self.pool.pin(table[index])
            self.pool.release([table[index]])
            table[index] = block_id
            self._num_filled[block_id] = offset
            self.num_used_slots += offset
            blocks.first_changed_block = min(blocks.first_changed_block, index)
        return copies

    def unpin(self) -> None:
        """The step's copies are done: their sources may be used anew."""
        self._empty(self.pool.unpin_all())

    def close(self, seq_id: int) -> None:
        """End a sequence; blocks that nobody else refers to are free at once."""
        blocks = self._sequences.pop(seq_id)
        for table in blocks.tables:
            self._empty(self.pool.release(table))

    def _empty(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.num_used_slots -= self._num_filled[block_id]
            self._num_filled[block_id] = 0

    def check(self) -> None:
        """Verify every invariant of pool and tables. O(blocks + table entries).

        Raises:
            MemoryInvariantError: one is broken; the message says which.
        """
        self.pool.check()
        references: Counter[int] = Counter()
        for seq_id, blocks in self._sequences.items():
            self._check_sequence(seq_id, blocks)
            for table in blocks.tables:
                references.update(table)
        for block_id, count in enumerate(self.pool.ref_counts):
            if references[block_id] != count:
                seen = references[block_id]
                raise MemoryInvariantError(
                    f"block {block_id} has {count} references and stands in {seen} block tables"
                )
        for block_id in self.pool.free_block_ids:
            if self._num_filled[block_id]:
                raise MemoryInvariantError(f"block {block_id} is free and holds tokens")
        num_filled = sum(self._num_filled)
        if num_filled != self.num_used_slots:
            raise MemoryInvariantError(
                f"{num_filled} slots hold tokens, {self.num_used_slots} are counted"
            )

    def _check_sequence(self, seq_id: int, blocks: SequenceBlocks) -> None:
        if not 0 <= blocks.num_tokens <= blocks.num_slots:
            raise MemoryInvariantError(
                f"sequence {seq_id}: {blocks.num_tokens} tokens in {blocks.num_slots} slots"
            )
        for table in blocks.tables:
            if len(table) * self.block_size != blocks.num_slots:
                raise MemoryInvariantError(f"sequence {seq_id}: table length and slots disagree")
            if len(set(table)) != len(table):
                raise MemoryInvariantError(f"sequence {seq_id} sees one block at two positions")
            for index in range(-(-blocks.num_tokens // self.block_size)):
                seen = min(self.block_size, blocks.num_tokens - index * self.block_size)
                if self._num_filled[table[index]] < seen:
                    raise MemoryInvariantError(
                        f"sequence {seq_id} sees tokens in block {table[index]} that are not there"
                    )
