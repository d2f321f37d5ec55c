"""KV memory as the scheduler sees it: give a sequence room, take it back, know what is shared and wasted.

Owns the block pool, the prefix cache with its host tier, and every live sequence's block tables. Must not
know requests, policies or tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..step import BlockCopy, BlockSwap
from .block_demand import BlockDemand, first_block
from .block_hash import HashChain, hash_block, in_group, root_hash
from .block_pool import BlockPool, MemoryInvariantError
from .block_table import SequenceBlocks
from .block_times import BlockTimes
from .host_index import HostIndex
from .prefix_cache import PrefixCache, PrefixMatch


class KVCacheManager:
    """Block tables over one pool.

    Tables grow a block at a time, when the token that needs it is scheduled (Kwon et al., 2023,
    section 4.2), so a sequence never holds more than one partly filled block.

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
        if not max_step_tokens and any(window is not None for window in windows):
            raise ValueError("what windowed groups hold depends on the tokens of a step: how many?")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_groups = len(self.windows)
        self.demand = BlockDemand(block_size, self.windows, max_step_tokens)
        self._windowed = [(g, w) for g, w in enumerate(self.windows) if w is not None]
        self.enable_prefix_caching = enable_prefix_caching
        self.block_bytes = block_bytes
        self.times = BlockTimes(num_blocks)
        self.cache = PrefixCache(
            self.pool, block_size, HostIndex(num_host_blocks), self.times, self.windows
        )
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

    # --- tables ----------------------------------------------------------------------------------

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
        """The step is done: copies and swaps are made, blocks in flight are there."""
        self.pool.unpin_all()
        self._copy_sources.clear()
        self.cache.commit()

    def close(self, seq_id: int, token_ids: Sequence[int] | None = None) -> None:
        """End a sequence; blocks that nobody else refers to are free at once.

        Args:
            token_ids: of the sequence, to keep its half-full last block findable; ``None``: do not.
        """
        blocks = self._sequences.pop(seq_id)
        held = blocks.all_held()
        self.cache.forget_in_flight(held)
        if token_ids is not None:
            self.publish_tail(blocks, token_ids)
        self.pool.release(held)
        self.times.released(held)

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
        references: Counter[int] = Counter()
        for blocks in sequences:
            for _, _, block_id in self._contents(blocks):
                references[block_id] += 1
        ref_counts = self.pool.ref_counts
        return {block_id for block_id, count in references.items() if ref_counts[block_id] == count}

    def _contents(self, blocks: SequenceBlocks) -> Iterator[tuple[int, int, int]]:
        """Group, table index and id of each block that holds tokens of a sequence."""
        end = -(-blocks.num_tokens // self.block_size)
        for group, table in enumerate(blocks.tables):
            for index in range(blocks.first_blocks[group], end):
                yield group, index, table[index]

    def num_uncached_tokens(self, sequences: Iterable[SequenceBlocks], own: set[int]) -> int:
        """Tokens to be computed again if the blocks ``own`` of these sequences are lost.

        To compute what a window shows takes all tokens before it, whose blocks are gone already.
        """
        gone, lost = [0] * self.num_groups, [set[int]() for _ in range(self.num_groups)]
        for blocks in sequences:
            gone = [max(pair) for pair in zip(gone, blocks.first_blocks, strict=True)]
            for group, _, block_id in self._contents(blocks):
                lost[group].add(block_id)
        num_filled = self.pool.num_filled
        return max(
            first * self.block_size + sum(num_filled[b] for b in block_ids & own)
            for first, block_ids in zip(gone, lost, strict=True)
        )

    def swap_out(
        self, sequences: Sequence[tuple[SequenceBlocks, Sequence[int]]], own: set[int]
    ) -> list[int] | None:
        """Copy blocks of these sequences to the host tier. Their tables stay as they are.

        Args:
            sequences: block tables and token ids.
            own: the blocks to copy, from :meth:`swappable_blocks`.

        Returns:
            The host blocks, held until :meth:`swap_done`; ``None``, and no change, without room.
        """
        contents: dict[bytes, int] = {}
        private = set()
        for blocks, token_ids in sequences:
            for group, index, block_id in self._contents(blocks):
                if block_id not in own:
                    continue
                name = in_group(self._name_of(blocks, index, token_ids), group)
                contents.setdefault(name, self._copy_sources.get(block_id, block_id))
                is_full = (index + 1) * self.block_size <= blocks.num_tokens
                if not (is_full and self.enable_prefix_caching):
                    private.add(name)
        held = self._hold_in_host(contents)
        for name in private if held is not None else ():
            self.cache.host.make_private(name)
        return held

    def _hold_in_host(self, contents: dict[bytes, int]) -> list[int] | None:
        """Copy blocks to the host tier and hold them there; ``None``, and no change, without room."""
        host = self.cache.host
        known = [i for name in contents if (i := host.find(name, is_holder=True)) is not None]
        for host_id in known:  # making room must not take these
            host.hold(host_id)
        if len(contents) - len(known) > host.num_available_blocks:
            host.release(known)
            return None
        held = []
        for name, block_id in contents.items():
            stored_id = self.cache.copy_to_host(name, block_id)
            if stored_id is None:
                raise MemoryInvariantError("the host tier has less room than it said")
            host.hold(stored_id)
            held.append(stored_id)
        host.release(known)
        return held

    def _name_of(self, blocks: SequenceBlocks, index: int, token_ids: Sequence[int]) -> bytes:
        """The name of what a sequence has computed of block ``index``, full or not."""
        size = self.block_size
        if (index + 1) * size <= blocks.num_tokens:
            return blocks.chain.hash_of(index, token_ids, size)
        if index:
            blocks.chain.hash_of(index - 1, token_ids, size)
        tail = token_ids[index * size : blocks.num_tokens]
        return hash_block(blocks.chain.parent_of(index), tail)

    def swap_done(self, host_ids: Sequence[int], sequences: Iterable[SequenceBlocks] = ()) -> None:
        """What was swapped out is back in these block tables, or not wanted any more."""
        names = self.cache.host.private_names(host_ids)
        self.cache.host.release(host_ids)
        for blocks in sequences if names else ():
            for block_id in blocks.all_held():
                known = self.cache.index.get(block_id)
                if known is not None and known.name in names:
                    self.cache.forget(block_id)

    def take_swaps(self) -> tuple[BlockSwap, ...]:
        """Moves to execute before everything else in the next plan; from here on the plan's business."""
        swaps, self.cache.swaps = self.cache.swaps, []
        return tuple(swaps)

    # --- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant of pool, tables, prefix cache and host tier. O(blocks + table entries).

        Raises:
            MemoryInvariantError: one is broken; the message says which.
        """
        self.pool.check()
        self.cache.check()
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
        for _, index, block_id in self._contents(blocks):
            seen = min(self.block_size, blocks.num_tokens - index * self.block_size)
            if self.pool.num_filled[block_id] < seen:
                raise MemoryInvariantError(
                    f"sequence {seq_id} sees tokens in block {block_id} that are not there"
                )
