"""Block tables over one pool: room that grows and is given back, shared and copied on write.

Owns every live sequence's tables. Must not know what the blocks hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..step import BlockCopy
from .block_demand import BlockDemand, first_block
from .block_hash import HashChain, root_hash
from .block_pool import BlockPool, MemoryInvariantError
from .block_table import SequenceBlocks
from .block_times import BlockTimes


class TableManager:
    """The block tables of all live sequences.

    Tables grow a block at a time, when the token that needs it is scheduled (Kwon et al., 2023,
    section 4.2), so a sequence never holds more than one partly filled block.

    Args:
        num_blocks: physical blocks, shared by all groups.
        block_size: tokens in a block.
        windows: per KV group, the tokens that a query of its layers sees; ``None``: all.
        max_step_tokens: most tokens that a step computes; needed where there are windows.

    Raises:
        ValueError: there are windows, and it is not said how long steps are.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        max_step_tokens: int = 0,
    ) -> None:
        if not max_step_tokens and any(window is not None for window in windows):
            raise ValueError("what windowed groups hold depends on the tokens of a step: how many?")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_groups = len(self.windows)
        self.demand = BlockDemand(block_size, self.windows, max_step_tokens)
        self.times = BlockTimes(num_blocks)
        self._windowed = [(g, w) for g, w in enumerate(self.windows) if w is not None]
        self._copy_sources: dict[int, int] = {}  # by the target of a copy that is not executed yet
        self._sequences: dict[int, SequenceBlocks] = {}

    @property
    def num_used_slots(self) -> int:
        """Slots that hold a token; those of a shared block count once."""
        return self.pool.num_used_slots

    @property
    def num_allocated_slots(self) -> int:
        """Slots of all used blocks. Minus ``num_used_slots``, it is the memory wasted."""
        return self.pool.num_used_blocks * self.block_size

    @property
    def num_saved_blocks(self) -> int:
        """Table entries that share another's block: what there would be without sharing, less what is."""
        return self.pool.num_references - self.pool.num_used_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence hold at most, over all groups."""
        return self.demand.of_sequence(num_tokens)

    def open(self, seq_id: int, chain: HashChain | None = None) -> SequenceBlocks:
        """Start a sequence with empty tables. ``chain`` names its blocks."""
        if seq_id in self._sequences:
            raise MemoryInvariantError(f"sequence {seq_id} has block tables already")
        blocks = SequenceBlocks(self.num_groups, chain or HashChain(root_hash(None)))
        self._sequences[seq_id] = blocks
        return blocks

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens in all; ``False``, and no change, if blocks run out."""
        if num_tokens <= blocks.num_slots:
            return True
        missing = -(-num_tokens // self.block_size) - len(blocks.tables[0])
        taken = self._allocate(missing * self.num_groups)
        if taken is None:
            return False
        for group, table in enumerate(blocks.tables):
            table.extend(taken[group * missing : (group + 1) * missing])
        blocks.num_slots += missing * self.block_size
        return True

    def _allocate(self, num_blocks: int) -> list[int] | None:
        taken = self.pool.allocate(num_blocks)
        if taken:
            self.times.allocated(taken)
        return taken

    def mark_computed(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Note that positions up to ``num_tokens - 1`` are filled; what no later query sees is given back."""
        size, fill = self.block_size, self.pool.fill
        for index in range(blocks.num_tokens // size, (num_tokens - 1) // size + 1):
            filled = min(size, num_tokens - index * size)
            for table in blocks.tables:
                fill(table[index], filled)
        blocks.num_tokens = num_tokens
        if self._windowed:
            self._drop_unseen(blocks)

    def _drop_unseen(self, blocks: SequenceBlocks) -> None:
        """Give back the blocks that fell out of their groups' windows."""
        for group, window in self._windowed:
            old = blocks.first_blocks[group]
            first = first_block(blocks.num_tokens, window, self.block_size)
            if first > old:
                gone = blocks.tables[group][old:first]
                self.pool.release(gone)
                self.times.released(gone)
                blocks.first_blocks[group] = first

    def fork(self, parent: SequenceBlocks, seq_id: int, num_tokens: int) -> SequenceBlocks:
        """Start a sequence that sees the first ``num_tokens`` tokens of another.

        Every block is shared, a half-full last one too (Kwon et al., 2023, section 4.4).

        Raises:
            MemoryInvariantError: the parent has given back what a window before ``num_tokens`` shows.
        """
        num_blocks = -(-num_tokens // self.block_size)
        for group, window in self._windowed:
            if first_block(num_tokens, window, self.block_size) < parent.first_blocks[group]:
                raise MemoryInvariantError(f"sequence {seq_id} forks from blocks that are gone")
        blocks = self.open(seq_id, parent.chain.fork(num_tokens // self.block_size))
        blocks.first_blocks[:] = parent.first_blocks
        for mine, theirs in zip(blocks.tables, parent.tables, strict=True):
            mine.extend(theirs[:num_blocks])
        self.pool.share(blocks.all_held())
        blocks.num_slots = num_blocks * self.block_size
        blocks.num_tokens = num_tokens
        return blocks

    def make_writable(self, blocks: SequenceBlocks, position: int) -> list[BlockCopy] | None:
        """Before ``position`` is written: give the sequence blocks of its own there (copy-on-write).

        The last owner of a block keeps it. The sources are pinned until :meth:`commit`.

        Returns:
            Copies to execute before the write; ``None``, and no change, if blocks run out.
        """
        index, offset = divmod(position, self.block_size)
        if index >= len(blocks.tables[0]):
            return []
        ref_counts = self.pool.ref_counts
        shared = [g for g, table in enumerate(blocks.tables) if ref_counts[table[index]] > 1]
        if not shared:
            return []
        taken = self._allocate(len(shared))
        if taken is None:
            return None
        copies = []
        for group, block_id in zip(shared, taken, strict=True):
            table = blocks.tables[group]
            copies.append(self._copy(group, table[index], block_id, offset))
            self.pool.release([table[index]])
            table[index] = block_id
            blocks.first_changed_block = min(blocks.first_changed_block, index)
        return copies

    def _copy(self, group: int, source: int, target: int, num_filled: int) -> BlockCopy:
        self.pool.pin(source)
        self.pool.fill(target, num_filled)
        self._copy_sources[target] = source
        return BlockCopy(group, source, target)

    def commit(self) -> None:
        """The step is done: copies are made."""
        self.pool.unpin_all()
        self._copy_sources.clear()

    def close(self, seq_id: int) -> None:
        """End a sequence; blocks that nobody else refers to are free at once."""
        held = self._sequences.pop(seq_id).all_held()
        self.pool.release(held)
        self.times.released(held)

    def check_tables(self) -> None:
        """Verify the tables by themselves and against the pool. O(blocks + table entries).

        Raises:
            MemoryInvariantError: they contradict themselves or it; the message says how.
        """
        references: Counter[int] = Counter()
        for seq_id, blocks in self._sequences.items():
            self._check_sequence(seq_id, blocks)
            references.update(blocks.all_held())
        for block_id, count in enumerate(self.pool.ref_counts):
            if references[block_id] != count:
                seen = references[block_id]
                raise MemoryInvariantError(
                    f"block {block_id} has {count} references and stands in {seen} block tables"
                )

    def _check_sequence(self, seq_id: int, blocks: SequenceBlocks) -> None:
        if not 0 <= blocks.num_tokens <= blocks.num_slots:
            raise MemoryInvariantError(
                f"sequence {seq_id}: {blocks.num_tokens} tokens in {blocks.num_slots} slots"
            )
        if any(len(table) * self.block_size != blocks.num_slots for table in blocks.tables):
            raise MemoryInvariantError(f"sequence {seq_id}: table length and slots disagree")
        held = blocks.all_held()
        if len(set(held)) != len(held):
            raise MemoryInvariantError(f"sequence {seq_id} sees one block at two positions")
        for window, first in zip(self.windows, blocks.first_blocks, strict=True):
            if first != first_block(blocks.num_tokens, window, self.block_size):
                raise MemoryInvariantError(
                    f"sequence {seq_id} has blocks from {first} on with a window of {window} before "
                    f"token {blocks.num_tokens}"
                )
        for _, index, block_id in blocks.contents(self.block_size):
            seen = min(self.block_size, blocks.num_tokens - index * self.block_size)
            if self.pool.num_filled[block_id] < seen:
                raise MemoryInvariantError(
                    f"sequence {seq_id} sees tokens in block {block_id} that are not there"
                )
