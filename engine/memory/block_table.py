"""A sequence's view of KV memory: contiguous token positions over blocks that lie anywhere."""

from __future__ import annotations

from collections.abc import Iterator

from .block_hash import HashChain


class SequenceBlocks:
    """The block tables of one sequence, one per KV group.

    Position ``p`` of the sequence lies in slot ``table[p // block_size] * block_size + p % block_size``,
    unless its block fell out of the group's window: what stands in the table then means nothing.
    """

    __slots__ = (
        "chain",
        "first_blocks",
        "first_changed_block",
        "num_slots",
        "num_tokens",
        "tables",
    )

    def __init__(self, num_groups: int, chain: HashChain) -> None:
        self.chain = chain
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.first_blocks = [0] * num_groups
        """Per group: table index of the first block that the sequence still has."""
        self.num_slots = 0
        """Slots that the tables cover, the same for each group."""
        self.num_tokens = 0
        """Slots that hold computed keys and values: positions 0 to num_tokens - 1."""
        self.first_changed_block = 0
        """Lowest table index that changed since the executor last saw the tables."""

    def held(self, group: int) -> list[int]:
        """The blocks that the sequence has in a group."""
        table, first = self.tables[group], self.first_blocks[group]
        return table[first:] if first else table

    def all_held(self) -> list[int]:
        """The blocks of all groups."""
        if len(self.tables) == 1:
            return self.held(0)
        return [block_id for group in range(len(self.tables)) for block_id in self.held(group)]

    def contents(self, block_size: int) -> Iterator[tuple[int, int, int]]:
        """Group, table index and id of each block that holds tokens of the sequence."""
        end = -(-self.num_tokens // block_size)
        for group, table in enumerate(self.tables):
            for index in range(self.first_blocks[group], end):
                yield group, index, table[index]
