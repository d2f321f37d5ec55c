"""Which device block holds which tokens: full blocks by name, and blocks that agree in their first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from .block_hash import hash_block
from .block_pool import MemoryInvariantError

MIN_INSIDE_TOKENS = 4
"""Tokens that a hit inside a block must save to be worth the copy."""
MAX_INSIDE_CANDIDATES = 8
"""Blocks that are compared for a hit inside a block, the latest first."""


class IndexedBlock(NamedTuple):
    """What is known of a block's content."""

    parent: bytes  # name of the block before it
    token_ids: tuple[int, ...]  # its first tokens; all of them if it has a name
    name: bytes | None  # of a full block


class PrefixIndex:
    """Blocks by content. A block is in it at most once, a name at most once."""

    def __init__(self) -> None:
        self._by_name: dict[bytes, int] = {}
        self._blocks: dict[int, IndexedBlock] = {}
        self._by_first_tokens: dict[tuple[bytes, tuple[int, ...]], dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block_id: int) -> IndexedBlock | None:
        return self._blocks.get(block_id)

    def find(self, name: bytes) -> int | None:
        """The block with this name."""
        return self._by_name.get(name)

    def candidates(self, parent: bytes, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Blocks after ``parent`` that begin like ``token_ids``: ids, and in how many tokens they agree."""
        first = tuple(token_ids[:MIN_INSIDE_TOKENS])
        found = self._by_first_tokens.get((parent, first))
        if found is None:
            return []
        latest = list(islice(reversed(found), MAX_INSIDE_CANDIDATES))
        return [(b, _num_common(self._blocks[b].token_ids, token_ids)) for b in latest]

    def add(self, block_id: int, block: IndexedBlock) -> bool:
        """Make a block findable, instead of what it was found by. ``False``: its name is taken."""
        if block.name is not None and block.name in self._by_name:
            return False
        self.remove(block_id)
        self._blocks[block_id] = block
        if block.name is not None:
            self._by_name[block.name] = block_id
        key = (block.parent, block.token_ids[:MIN_INSIDE_TOKENS])
        self._by_first_tokens.setdefault(key, {})[block_id] = None
        return True

    def remove(self, block_id: int) -> IndexedBlock | None:
        """Forget a block; returns what was known of it."""
        block = self._blocks.pop(block_id, None)
        if block is None:
            return None
        if block.name is not None:
            del self._by_name[block.name]
        key = (block.parent, block.token_ids[:MIN_INSIDE_TOKENS])
        others = self._by_first_tokens[key]
        del others[block_id]
        if not others:
            del self._by_first_tokens[key]
        return block

    def check(self, block_size: int) -> None:
        """Verify that every entry is what its block holds, and that nothing else is left.

        Raises:
            MemoryInvariantError: it is not so.
        """
        named = {b.name: block_id for block_id, b in self._blocks.items() if b.name is not None}
        if named != self._by_name:
            raise MemoryInvariantError("names and blocks of the prefix index disagree")
        listed = [block_id for found in self._by_first_tokens.values() for block_id in found]
        if sorted(listed) != sorted(self._blocks):
            raise MemoryInvariantError("first tokens and blocks of the prefix index disagree")
        for block_id, block in self._blocks.items():
            is_full = len(block.token_ids) == block_size
            if is_full != (block.name is not None):
                raise MemoryInvariantError(
                    f"block {block_id} has a name and is not full, or vice versa"
                )
            if is_full and block.name != hash_block(block.parent, block.token_ids):
                raise MemoryInvariantError(f"block {block_id} is known by a wrong name")


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
