"""The pool of physical KV blocks: who holds how many references, and which blocks are free.

Knows block ids only; what a block holds and which sequence sees it where is the business of block
tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ..errors import OctavoError


class MemoryInvariantError(OctavoError):
    """The bookkeeping of KV memory contradicts itself. The engine must not go on."""


class BlockPool:
    """``num_blocks`` blocks with reference counts and a free queue.

    A block that loses its last reference goes to the front of the free queue, so a finished sequence's
    blocks are the next ones used and memory that was never needed stays untouched.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._pinned: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def free_block_ids(self) -> list[int]:
        """In the order in which they are used."""
        return list(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take free blocks, each with one reference; ``None`` if there are not that many."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, all of which are in use."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                raise MemoryInvariantError(f"block {block_id} is shared while it is free")
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """Give back one reference to each block, the last of the table first.

        Returns:
            The blocks that are free by this.
        """
        freed = []
        for block_id in reversed(block_ids):
            if self.ref_counts[block_id] == 0:
                raise MemoryInvariantError(f"block {block_id} is released while it is free")
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0 and block_id not in self._pinned:
                self._free.appendleft(block_id)
                freed.append(block_id)
        return freed

    def pin(self, block_id: int) -> None:
        """Keep a block from being used anew, references or not, until :meth:`unpin_all`."""
        self._pinned.add(block_id)

    def unpin_all(self) -> list[int]:
        """Let go of pinned blocks. Returns those that are free by this."""
        freed = [block_id for block_id in self._pinned if self.ref_counts[block_id] == 0]
        self._pinned.clear()
        self._free.extendleft(freed)
        return freed

    def check(self) -> None:
        """Verify that exactly the blocks without references and pins are free, each once.

        Raises:
            MemoryInvariantError: they are not.
        """
        free = list(self._free)
        if len(set(free)) != len(free):
            raise MemoryInvariantError("a block is in the free queue twice")
        unused = {block_id for block_id, count in enumerate(self.ref_counts) if count == 0}
        expected = unused - self._pinned
        if set(free) != expected:
            wrong = sorted(set(free) ^ expected)[:8]
            raise MemoryInvariantError(
                f"free queue and reference counts disagree on blocks {wrong}"
            )
        if min(self.ref_counts, default=0) < 0:
            raise MemoryInvariantError("a reference count is negative")
