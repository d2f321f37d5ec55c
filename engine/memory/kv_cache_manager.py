"""KV memory as the scheduler sees it: give a sequence room, take it back, know what is shared and wasted.

Puts the prefix cache and its host tier behind the block tables. Must not know requests, policies or tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..step import BlockCopy, BlockSwap
from .block_hash import HashChain, in_group
from .block_pool import MemoryInvariantError
from .block_table import SequenceBlocks
from .host_index import HostIndex
from .prefix_cache import PrefixCache, PrefixMatch
from .swapper import Swapper
from .table_manager import TableManager


class KVCacheManager(TableManager):
    """Block tables whose content is found again.

    Args:
        num_blocks: physical blocks, shared by all groups.
        block_size: tokens in a block.
        windows: per KV group, the tokens that a query of its layers sees; ``None``: all.
        enable_prefix_caching: keep what is computed findable for other sequences.
        num_host_blocks: size of the host tier.
        block_bytes: of one block over all layers of its group, for the counts of bytes moved.
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
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        block_bytes: int = 0,
        max_step_tokens: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, windows, max_step_tokens=max_step_tokens)
        self.enable_prefix_caching = enable_prefix_caching
        self.block_bytes = block_bytes
        self.cache = PrefixCache(
            self.pool, block_size, HostIndex(num_host_blocks), self.times, self.windows
        )
        self._swapper = Swapper(
            self.cache,
            self.pool,
            block_size,
            self.num_groups,
            enable_prefix_caching=enable_prefix_caching,
        )

    def commit(self) -> None:
        """The step is done: copies and swaps are made, blocks in flight are there."""
        super().commit()
        self.cache.commit()

    def close(self, seq_id: int, token_ids: Sequence[int] | None = None) -> None:
        """End a sequence; blocks that nobody else refers to are free at once.

        Args:
            token_ids: of the sequence, to keep its half-full last block findable; ``None``: do not.
        """
        blocks = self._sequences[seq_id]
        self.cache.forget_in_flight(blocks.all_held())
        if token_ids is not None:
            self.publish_tail(blocks, token_ids)
        super().close(seq_id)

    def check(self) -> None:
        """Verify every invariant of pool, tables, prefix cache and host tier. O(blocks + table entries).

        Raises:
            MemoryInvariantError: one is broken; the message says which.
        """
        self.pool.check()
        self.cache.check()
        self.check_tables()

    # --- prefix cache ----------------------------------------------------------------------------

    def match(
        self, chain: HashChain, token_ids: Sequence[int], num_tokens: int, num_swapped: int = 0
    ) -> PrefixMatch:
        """What is there of the first ``num_tokens`` tokens (see :meth:`PrefixCache.match`)."""
        if not self.enable_prefix_caching and not num_swapped:
            return PrefixMatch()
        return self.cache.match(chain, token_ids, num_tokens, num_swapped)

    def num_blocks_taken(
        self, match: PrefixMatch, num_tokens: int, num_own: int = 0, num_sequences: int = 1
    ) -> int:
        """Free blocks that a sequence of ``num_tokens`` takes whose first tokens are found so, at most.

        Args:
            num_own: of each group, blocks that others of the request take beside those of the first.
            num_sequences: of the request, the first among them.
        """
        ref_counts, taken = self.pool.ref_counts, 0
        for group, window in enumerate(self.windows):
            most = -(-num_tokens // self.block_size) + num_own
            if match.num_tokens:
                found = match.device_block_ids[group]
                most -= sum(1 for b in found if b >= 0 and ref_counts[b])
            if match.num_tokens and num_sequences == 1:
                most -= match.first_blocks[group]
            if window is not None:
                most = min(most, self.demand.in_window(window, num_sequences))
            taken += most
        return taken + sum(1 for b in match.copied_block_ids if not ref_counts[b])

    def attach(
        self, blocks: SequenceBlocks, match: PrefixMatch, token_ids: Sequence[int]
    ) -> list[BlockCopy]:
        """Let an empty sequence of ``token_ids`` begin with what was found.

        Returns:
            Copies to execute before the sequence's first write.

        Raises:
            MemoryInvariantError: there is no room, which admission must have seen.
        """
        if not match.num_tokens:
            return []
        fresh = iter(self._take_found(match))
        found = zip(blocks.tables, match.first_blocks, match.device_block_ids, strict=True)
        for table, first, block_ids in found:
            table.extend([0] * first)  # never read
            table.extend(b if b >= 0 else next(fresh) for b in block_ids)
        blocks.first_blocks[:] = match.first_blocks
        if match.host_tail_ids or match.copied_block_ids:
            for table in blocks.tables:
                table.append(next(fresh))
        blocks.num_slots = len(blocks.tables[0]) * self.block_size
        blocks.num_tokens = match.num_tokens
        self._fill_attached(blocks, match, token_ids)
        copies = [
            self._copy(group, block_id, blocks.tables[group][-1], match.num_inside_tokens)
            for group, block_id in enumerate(match.copied_block_ids)
        ]
        self._drop_unseen(blocks)
        return copies

    def _take_found(self, match: PrefixMatch) -> list[int]:
        """Refer to device blocks, and make room for what is elsewhere, which must not take what was found.

        Returns:
            Fresh blocks: for what comes from the host tier, in order, then for the copied ones.
        """
        host_ids = [*match.host_block_ids, *match.host_tail_ids]
        for block_ids in match.device_block_ids:
            for block_id in block_ids:
                if block_id >= 0:
                    self.pool.reuse(block_id)
        for host_id in host_ids:
            self.cache.host.hold(host_id)
        for block_id in match.copied_block_ids:
            self.pool.pin(block_id)
        taken = self._allocate(len(host_ids) + len(match.copied_block_ids))
        if taken is None:
            raise MemoryInvariantError("a sequence was admitted without room for its prefix")
        for host_id, block_id in zip(host_ids, taken, strict=False):
            self.cache.copy_from_host(host_id, block_id)
        return taken

    def _fill_attached(
        self, blocks: SequenceBlocks, match: PrefixMatch, token_ids: Sequence[int]
    ) -> None:
        """What came from the host tier is there before the step begins, and findable as it was."""
        for group, block_ids in enumerate(match.device_block_ids):
            table = blocks.tables[group]
            for index, block_id in enumerate(block_ids, match.first_blocks[group]):
                if block_id < 0:
                    self.pool.fill(table[index], self.block_size)
                    self.cache.register(
                        table[index], blocks.chain, index, token_ids, group, in_flight=False
                    )
        if match.host_tail_ids:
            for table in blocks.tables:
                self.pool.fill(table[-1], match.num_tokens % self.block_size)
        self.cache.host.release(match.host_block_ids)
        self.cache.host.release(match.host_tail_ids)

    def extend(self, blocks: SequenceBlocks, token_ids: Sequence[int]) -> None:
        """Let a sequence that forks anew take up what is still there of its own tokens.

        Whole blocks of the device only; at least one token is left to compute.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        index = blocks.num_tokens // size
        while (index + 1) * size < len(token_ids):
            name = blocks.chain.hash_of(index, token_ids, size)
            names = (in_group(name, group) for group in range(self.num_groups))
            found = [b for b in map(self.cache.index.find, names) if b is not None]
            if len(found) < self.num_groups:
                return
            for table, block_id in zip(blocks.tables, found, strict=True):
                self.pool.reuse(block_id)
                self.pool.release(table[index:])  # a half-full block of the prompt, if anything
                table[index:] = [block_id]
            blocks.first_changed_block = min(blocks.first_changed_block, index)
            index += 1
            blocks.num_slots = blocks.num_tokens = index * size
            self._drop_unseen(blocks)

    def publish(
        self, blocks: SequenceBlocks, token_ids: Sequence[int], start: int, end: int
    ) -> None:
        """Make the blocks findable that the tokens ``start`` to ``end - 1``, just scheduled, fill."""
        size = self.block_size
        if not self.enable_prefix_caching or start // size == end // size:
            return
        blocks.chain.hash_of(end // size - 1, token_ids, size)  # all at once
        for group, table in enumerate(blocks.tables):
            for index in range(start // size, end // size):
                self.cache.register(
                    table[index], blocks.chain, index, token_ids, group, in_flight=True
                )

    def publish_tail(self, blocks: SequenceBlocks, token_ids: Sequence[int]) -> None:
        """Make the half-full last block findable by the computed tokens in it."""
        index = blocks.num_tokens // self.block_size
        if not self.enable_prefix_caching or blocks.num_tokens % self.block_size == 0:
            return
        for group, table in enumerate(blocks.tables):
            if table[index] not in self._copy_sources:
                self.cache.register_tail(
                    table[index], blocks.chain, index, token_ids, blocks.num_tokens, group
                )

    def forget(self, blocks: SequenceBlocks) -> None:
        """Let nobody find a sequence's blocks: what was computed in them cannot be trusted."""
        for block_id in blocks.all_held():
            self.cache.forget(block_id)
        names = blocks.chain.hashes[: len(blocks.tables[0])]
        for group, first in enumerate(blocks.first_blocks):
            for index, name in enumerate(names):
                gone = self.cache.index.find(in_group(name, group)) if index < first else None
                if gone is not None:
                    self.cache.forget(gone)
                self.cache.host.make_private(in_group(name, group))

    def reset_prefix_cache(self) -> None:
        """Let nobody find anything that was computed so far. Call between steps."""
        self.cache.reset()

    # --- host tier -------------------------------------------------------------------------------

    def swappable_blocks(self, sequences: Iterable[SequenceBlocks]) -> set[int]:
        """Blocks with content that nobody but these sequences refers to."""
        return self._swapper.swappable_blocks(sequences)

    def num_uncached_tokens(self, sequences: Iterable[SequenceBlocks], own: set[int]) -> int:
        """Tokens to be computed again if the blocks ``own`` of these sequences are lost."""
        return self._swapper.num_uncached_tokens(sequences, own)

    def swap_out(
        self, sequences: Sequence[tuple[SequenceBlocks, Sequence[int]]], own: set[int]
    ) -> list[int] | None:
        """Copy blocks of these sequences to the host tier (see :meth:`Swapper.swap_out`)."""
        return self._swapper.swap_out(sequences, own, self._copy_sources)

    def swap_done(self, host_ids: Sequence[int], sequences: Iterable[SequenceBlocks] = ()) -> None:
        """What was swapped out is back in these block tables, or not wanted any more."""
        self._swapper.swap_done(host_ids, sequences)

    def take_swaps(self) -> tuple[BlockSwap, ...]:
        """Moves to execute before everything else in the next plan; from here on the plan's business."""
        swaps, self.cache.swaps = self.cache.swaps, []
        return tuple(swaps)
