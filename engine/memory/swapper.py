"""What preempted requests keep in the host tier: which of their blocks, copied there, and let go.

Knows block tables and the prefix cache. Must not know when it is worth it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .block_hash import hash_block, in_group
from .block_pool import BlockPool, MemoryInvariantError
from .block_table import SequenceBlocks
from .prefix_cache import PrefixCache


class Swapper:
    """Moves blocks of sequences to the host tier.

    Args:
        cache: finds them again, and notes the moves.
        pool: the device blocks.
        block_size: tokens in a block.
        num_groups: how many KV groups there are.
        enable_prefix_caching: others may find what is moved in full blocks; else only its owner.
    """

    def __init__(
        self,
        cache: PrefixCache,
        pool: BlockPool,
        block_size: int,
        num_groups: int,
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._block_size = block_size
        self._num_groups = num_groups
        self._enable_prefix_caching = enable_prefix_caching

    def swappable_blocks(self, sequences: Iterable[SequenceBlocks]) -> set[int]:
        """Blocks with content that nobody but these sequences refers to."""
        references: Counter[int] = Counter()
        for blocks in sequences:
            for _, _, block_id in blocks.contents(self._block_size):
                references[block_id] += 1
        ref_counts = self._pool.ref_counts
        return {block_id for block_id, count in references.items() if ref_counts[block_id] == count}

    def num_uncached_tokens(self, sequences: Iterable[SequenceBlocks], own: set[int]) -> int:
        """Tokens to be computed again if the blocks ``own`` of these sequences are lost.

        To compute what a window shows takes all tokens before it, whose blocks are gone already.
        """
        gone, lost = [0] * self._num_groups, [set[int]() for _ in range(self._num_groups)]
        for blocks in sequences:
            gone = [max(pair) for pair in zip(gone, blocks.first_blocks, strict=True)]
            for group, _, block_id in blocks.contents(self._block_size):
                lost[group].add(block_id)
        num_filled = self._pool.num_filled
        return max(
            first * self._block_size + sum(num_filled[b] for b in block_ids & own)
            for first, block_ids in zip(gone, lost, strict=True)
        )

    def swap_out(
        self,
        sequences: Sequence[tuple[SequenceBlocks, Sequence[int]]],
        own: set[int],
        copy_sources: Mapping[int, int],
    ) -> list[int] | None:
        """Copy blocks of these sequences to the host tier. Their tables stay as they are.

        Args:
            sequences: block tables and token ids.
            own: the blocks to copy, from :meth:`swappable_blocks`.
            copy_sources: by the target of a copy that is not executed yet, where its content is.

        Returns:
            The host blocks, held until :meth:`swap_done`; ``None``, and no change, without room.
        """
        contents: dict[bytes, int] = {}
        private = set()
        for blocks, token_ids in sequences:
            for group, index, block_id in blocks.contents(self._block_size):
                if block_id not in own:
                    continue
                name = in_group(self._name_of(blocks, index, token_ids), group)
                contents.setdefault(name, copy_sources.get(block_id, block_id))
                is_full = (index + 1) * self._block_size <= blocks.num_tokens
                if not (is_full and self._enable_prefix_caching):
                    private.add(name)
        held = self._hold_in_host(contents)
        for name in private if held is not None else ():
            self._cache.host.make_private(name)
        return held

    def _hold_in_host(self, contents: dict[bytes, int]) -> list[int] | None:
        """Copy blocks to the host tier and hold them there; ``None``, and no change, without room."""
        host = self._cache.host
        known = [i for name in contents if (i := host.find(name, is_holder=True)) is not None]
        for host_id in known:  # making room must not take these
            host.hold(host_id)
        if len(contents) - len(known) > host.num_available_blocks:
            host.release(known)
            return None
        held = []
        for name, block_id in contents.items():
            stored_id = self._cache.copy_to_host(name, block_id)
            if stored_id is None:
                raise MemoryInvariantError("the host tier has less room than it said")
            host.hold(stored_id)
            held.append(stored_id)
        host.release(known)
        return held

    def _name_of(self, blocks: SequenceBlocks, index: int, token_ids: Sequence[int]) -> bytes:
        """The name of what a sequence has computed of block ``index``, full or not."""
        size = self._block_size
        if (index + 1) * size <= blocks.num_tokens:
            return blocks.chain.hash_of(index, token_ids, size)
        if index:
            blocks.chain.hash_of(index - 1, token_ids, size)
        tail = token_ids[index * size : blocks.num_tokens]
        return hash_block(blocks.chain.parent_of(index), tail)

    def swap_done(self, host_ids: Sequence[int], sequences: Iterable[SequenceBlocks] = ()) -> None:
        """What was swapped out is back in these block tables, or not wanted any more."""
        names = self._cache.host.private_names(host_ids)
        self._cache.host.release(host_ids)
        for blocks in sequences if names else ():
            for block_id in blocks.all_held():
                known = self._cache.index.get(block_id)
                if known is not None and known.name in names:
                    self._cache.forget(block_id)
