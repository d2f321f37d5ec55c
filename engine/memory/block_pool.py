"""The pool of physical KV blocks: who refers to them, how full they are, which are free.

Knows block ids only; what a block holds is the business of the prefix cache, which sequence sees it where
that of the block tables.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from ..errors import OctavoError


class MemoryInvariantError(OctavoError):
    """The bookkeeping of KV memory contradicts itself. The engine must not go on."""


class BlockPool:
    """``num_blocks`` blocks with reference counts and two free queues.

    A block that loses its last reference is free. If nothing in it can be found again it goes to the front
    of the plain queue: it is the next one used, and memory that was never needed stays untouched. If it is
    cached it stays findable, and its memory is taken only when the plain queue is empty, least recently
    used first. Every operation is O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_filled = [0] * num_blocks
        """Leading slots of each block that hold valid keys and values."""
        self.num_used_slots = 0
        """Filled slots of used blocks; those of a shared block count once."""
        self.num_references = 0
        self.num_shared_blocks = 0
        """Blocks with more than one reference."""
        self.on_evict: Callable[[int], None] | None = None
        """Called with a cached block before its memory is taken."""
        self._free = deque(range(num_blocks))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._is_cached = [False] * num_blocks
        self._pinned: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._free_cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free) - len(self._free_cached)

    @property
    def free_block_ids(self) -> list[int]:
        """In the order in which they are used."""
        return [*self._free, *self._free_cached]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take free blocks, each with one reference; ``None`` if there are not that many."""
        free = self._free
        if num_blocks == 1 and free:  # a sequence that grows, by far the most frequent
            block_id = free.popleft()
            self.ref_counts[block_id] = 1
            self.num_references += 1
            return [block_id]
        if num_blocks <= len(free):
            block_ids = [free.popleft() for _ in range(num_blocks)]
        elif num_blocks <= self.num_free_blocks:
            block_ids = list(free)
            free.clear()
            block_ids += [self._evict() for _ in range(num_blocks - len(block_ids))]
        else:
            return None
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        self.num_references += num_blocks
        return block_ids

    def _evict(self) -> int:
        block_id, _ = self._free_cached.popitem(last=False)
        if self.on_evict is not None:
            self.on_evict(block_id)
        self._is_cached[block_id] = False
        self.num_filled[block_id] = 0
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, all of which are in use."""
        ref_counts = self.ref_counts
        for block_id in block_ids:
            count = ref_counts[block_id]
            if count == 0:
                raise MemoryInvariantError(f"block {block_id} is shared while it is free")
            ref_counts[block_id] = count + 1
            self.num_shared_blocks += count == 1
            self.num_references += 1

    def reuse(self, block_id: int) -> None:
        """Add one reference to a cached block, in use or free."""
        if self.ref_counts[block_id] or block_id in self._pinned:
            self._add_reference(block_id)
            return
        if block_id not in self._free_cached:
            raise MemoryInvariantError(f"block {block_id} is used again while nothing is in it")
        del self._free_cached[block_id]
        self.num_used_slots += self.num_filled[block_id]
        self._add_reference(block_id)

    def _add_reference(self, block_id: int) -> None:
        self.num_shared_blocks += self.ref_counts[block_id] == 1
        self.ref_counts[block_id] += 1
        self.num_references += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block, the last of the table first.

        So a sequence's deepest block is the first of its blocks to be evicted.
        """
        ref_counts, pinned = self.ref_counts, self._pinned
        for block_id in reversed(block_ids):
            count = ref_counts[block_id]
            if count == 0:
                raise MemoryInvariantError(f"block {block_id} is released while it is free")
            ref_counts[block_id] = count - 1
            if count == 2:
                self.num_shared_blocks -= 1
            elif count == 1 and block_id not in pinned:
                self._set_free(block_id)
        self.num_references -= len(block_ids)

    def _set_free(self, block_id: int) -> None:
        self.num_used_slots -= self.num_filled[block_id]
        if self._is_cached[block_id]:
            self._free_cached[block_id] = None
        else:
            self.num_filled[block_id] = 0
            self._free.appendleft(block_id)

    def fill(self, block_id: int, num_filled: int) -> None:
        """Note that the first ``num_filled`` slots of a used block are valid. Never takes any back."""
        more = num_filled - self.num_filled[block_id]
        if more > 0:
            self.num_filled[block_id] = num_filled
            self.num_used_slots += more

    def set_cached(self, block_id: int, is_cached: bool) -> None:
        """Say whether a block's content can be found again."""
        self._is_cached[block_id] = is_cached
        if not is_cached and block_id in self._free_cached:
            del self._free_cached[block_id]
            self.num_filled[block_id] = 0
            self._free.appendleft(block_id)

    def is_cached(self, block_id: int) -> bool:
        return self._is_cached[block_id]

    def pin(self, block_id: int) -> None:
        """Keep a block from being used anew, references or not, until :meth:`unpin_all`."""
        if block_id in self._free_cached:
            del self._free_cached[block_id]
            self.num_used_slots += self.num_filled[block_id]
        self._pinned.add(block_id)

    def unpin_all(self) -> None:
        """Let go of pinned blocks."""
        pinned, self._pinned = self._pinned, set()
        for block_id in pinned:
            if self.ref_counts[block_id] == 0:
                self._set_free(block_id)

    def check(self) -> None:
        """Verify counts and queues against each other. O(blocks).

        Raises:
            MemoryInvariantError: they disagree; the message says on what.
        """
        free = self.free_block_ids
        if len(set(free)) != len(free):
            raise MemoryInvariantError("a block is in the free queues twice")
        if min(self.ref_counts, default=0) < 0:
            raise MemoryInvariantError("a reference count is negative")
        unused = {block_id for block_id, count in enumerate(self.ref_counts) if count == 0}
        expected = unused - self._pinned
        if set(free) != expected:
            wrong = sorted(set(free) ^ expected)[:8]
            raise MemoryInvariantError(
                f"free queues and reference counts disagree on blocks {wrong}"
            )
        if not all(self._is_cached[block_id] for block_id in self._free_cached):
            raise MemoryInvariantError("a block waits for eviction with nothing cached in it")
        if any(self._is_cached[b] or self.num_filled[b] for b in self._free):
            raise MemoryInvariantError("a block in the plain free queue holds tokens")
        self._check_sums(set(free))

    def _check_sums(self, free: set[int]) -> None:
        num_filled = sum(n for b, n in enumerate(self.num_filled) if b not in free)
        if num_filled != self.num_used_slots:
            raise MemoryInvariantError(
                f"{num_filled} slots hold tokens, {self.num_used_slots} are counted"
            )
        if sum(self.ref_counts) != self.num_references:
            raise MemoryInvariantError("the references are miscounted")
        if sum(count > 1 for count in self.ref_counts) != self.num_shared_blocks:
            raise MemoryInvariantError("the shared blocks are miscounted")
