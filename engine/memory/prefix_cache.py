"""The prefix cache: which blocks hold what, on the device and in the host tier, and what may be hit.

A block is registered under the name of its content when the step that fills it is scheduled: within a
layer, all keys and values of a step are stored before its attention reads any, so requests that arrive
together share. Until that step is done the block is in flight: it may be shared whole, but not copied,
and it is forgotten if its writer leaves the plan.

Eviction takes a block's memory when the pool has nothing else; with a host tier, a full block is copied
there first. Decides nothing about requests; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..step import BlockSwap
from .block_demand import first_block
from .block_hash import HashChain, group_of, hash_block, in_group
from .block_pool import BlockPool, MemoryInvariantError
from .block_times import BlockTimes
from .host_index import HostIndex
from .prefix_index import MIN_INSIDE_TOKENS, IndexedBlock, PrefixIndex


class PrefixMatch(NamedTuple):
    """What is there of a sequence's first tokens. Nothing is taken by looking.

    A KV group without a window needs all full blocks of what is found, one with a window the last of them.
    """

    num_tokens: int = 0  # found in all
    first_blocks: tuple[int, ...] = ()  # per KV group: table index of the first block that it needs
    device_block_ids: tuple[
        tuple[int, ...], ...
    ] = ()  # per group, full blocks from there on; those in the host tier: -1
    host_block_ids: tuple[int, ...] = ()  # of the blocks marked -1, in order, group after group
    copied_block_ids: tuple[
        int, ...
    ] = ()  # after them, one per group: device blocks that agree in their first tokens
    host_tail_ids: tuple[
        int, ...
    ] = ()  # or, one per group, the half-full last block of a sequence swapped out
    num_inside_tokens: int = 0  # found in the copied blocks
    num_host_tokens: int = 0  # found in the host tier

    def without_copy(self) -> PrefixMatch:
        """The same without the hit inside a block, which needs a block more while it is copied."""
        return self._replace(
            num_tokens=self.num_tokens - self.num_inside_tokens,
            copied_block_ids=(),
            num_inside_tokens=0,
        )


class _Wanted(NamedTuple):
    """What is looked for."""

    chain: HashChain
    token_ids: Sequence[int]
    is_holder: bool  # may find what is private in the host tier


class PrefixCache:
    """Finds, registers and forgets blocks by content, over one pool and one host tier.

    Args:
        pool: the device blocks.
        block_size: tokens in a block.
        host: the host tier; of no blocks if there is none.
        times: notes evictions.
        windows: per KV group, tokens that a query sees; ``None``: all.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        host: HostIndex,
        times: BlockTimes,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.index = PrefixIndex()
        self.host = host
        self.num_evictions = 0
        self.swaps: list[BlockSwap] = []
        """Moves that the next plan has to make, in order."""
        self._pool = pool
        self._block_size = block_size
        self._times = times
        self._windows = tuple(windows)
        none = ((),) * len(self._windows)
        self._nothing = PrefixMatch(0, (0,) * len(none), none)
        self._in_flight: set[int] = set()
        pool.on_evict = self._evict

    # --- look ------------------------------------------------------------------------------------

    def match(
        self, chain: HashChain, token_ids: Sequence[int], num_tokens: int, num_swapped: int = 0
    ) -> PrefixMatch:
        """The longest cached prefix of the first ``num_tokens`` of ``token_ids`` that all groups have.

        Args:
            chain: names of the sequence's blocks.
            num_swapped: tokens that the sequence had when it was swapped out.
        """
        wanted, size = _Wanted(chain, token_ids, num_swapped > 0), self._block_size
        runs = self._runs(wanted, num_tokens // size)
        num_blocks = min((len(run) for run in runs.values()), default=num_tokens // size)
        if len(runs) < len(self._windows):
            num_blocks = self._num_servable(wanted, num_blocks)
        if num_blocks * size < num_swapped and num_swapped % size:
            back = self._swapped(wanted, runs, num_swapped)
            if back is not None:
                return back
        match = self._match_of(wanted, runs, num_blocks, num_blocks * size) if num_blocks else None
        return self._with_inside(match or self._nothing, wanted, num_tokens)

    def _find(self, wanted: _Wanted, index: int, group: int) -> int | None:
        """Where full block ``index`` is: the id of a device block, or ``~id`` of one in the host tier."""
        name = wanted.chain.hash_of(index, wanted.token_ids, self._block_size)
        if group:
            name = in_group(name, group)
        block_id = self.index.find(name)
        if block_id is not None:
            return block_id
        host_id = self.host.find(name, is_holder=wanted.is_holder)
        return None if host_id is None else ~host_id

    def _runs(self, wanted: _Wanted, most: int) -> dict[int, list[int]]:
        """Of each group without a window: where the first blocks are, up to one that is missing."""
        runs: dict[int, list[int]] = {}
        for group, window in enumerate(self._windows):
            if window is None:
                runs[group] = self._places(wanted, range(most), group)
                most = len(runs[group])
        return runs

    def _places(self, wanted: _Wanted, indices: range, group: int) -> list[int]:
        """Where these blocks are (see :meth:`_find`), up to one that is missing."""
        chain, token_ids, _ = wanted
        size, find, places = self._block_size, self.index.find, list[int]()
        for index in indices:
            name = chain.hash_of(index, token_ids, size)
            place = find(in_group(name, group) if group else name)
            if place is None:
                place = self._find(wanted, index, group)
                if place is None:
                    break
            places.append(place)
        return places

    def _num_servable(self, wanted: _Wanted, num_blocks: int) -> int:
        """The most blocks, up to ``num_blocks``, whose last window all windowed groups have.

        From long to short: if a block is missing, no prefix that has it in its window can be served.
        """
        end, is_sure = num_blocks, False
        while not is_sure:
            is_sure = True
            for group, window in enumerate(self._windows):
                first = first_block(end * self._block_size, window, self._block_size)
                for index in range(end - 1, first - 1, -1) if window is not None else ():
                    if self._find(wanted, index, group) is None:
                        end, is_sure = index, False
                        break
        return end

    def _match_of(
        self, wanted: _Wanted, runs: dict[int, list[int]], num_blocks: int, num_tokens: int
    ) -> PrefixMatch | None:
        """Of ``num_tokens`` tokens that begin with ``num_blocks`` full blocks, the latter's part."""
        size = self._block_size
        firsts, device, host, num_host_tokens = [], [], list[int](), 0
        for group, window in enumerate(self._windows):
            first = first_block(num_tokens, window, size)
            places = runs[group][:num_blocks] if window is None else None
            if places is None:
                places = self._places(wanted, range(first, num_blocks), group)
            if len(places) < num_blocks - first:
                return None
            firsts.append(first)
            if min(places, default=0) < 0:
                in_host = [~place for place in places if place < 0]
                host += in_host
                num_host_tokens = max(num_host_tokens, len(in_host) * size)
                places = [max(place, -1) for place in places]
            device.append(tuple(places))
        return PrefixMatch(
            num_blocks * size,
            tuple(firsts),
            tuple(device),
            tuple(host),
            num_host_tokens=num_host_tokens,
        )

    def _swapped(
        self, wanted: _Wanted, runs: dict[int, list[int]], num_swapped: int
    ) -> PrefixMatch | None:
        """All that a sequence had when it was swapped out, with its half-full last block."""
        num_blocks, num_inside = divmod(num_swapped, self._block_size)
        match = self._match_of(wanted, runs, num_blocks, num_swapped)
        if match is None:
            return None
        chain, token_ids = wanted.chain, wanted.token_ids
        if num_blocks:
            chain.hash_of(num_blocks - 1, token_ids, self._block_size)
        tail = token_ids[num_swapped - num_inside : num_swapped]
        name = hash_block(chain.parent_of(num_blocks), tail)
        groups = range(len(self._windows))
        found = [self.host.find(in_group(name, group), is_holder=True) for group in groups]
        tails = tuple(host_id for host_id in found if host_id is not None)
        if len(tails) < len(groups):
            return None
        return match._replace(
            num_tokens=num_swapped,
            host_tail_ids=tails,
            num_host_tokens=match.num_host_tokens + num_inside,
        )

    def _with_inside(self, match: PrefixMatch, wanted: _Wanted, num_tokens: int) -> PrefixMatch:
        """Add the blocks that agree longest in their first tokens; the last token is left to compute."""
        found, size = match.num_tokens, self._block_size
        rest = wanted.token_ids[found : max(found, min(num_tokens - 1, found + size))]
        if len(rest) < MIN_INSIDE_TOKENS:
            return match
        parent = wanted.chain.parent_of(found // size)
        copied, num_inside = [], len(rest)
        for group in range(len(self._windows)):
            best_id, most = self._best_inside(in_group(parent, group), rest)
            if best_id is None:
                return match
            copied.append(best_id)
            num_inside = min(num_inside, most)
        return match._replace(
            num_tokens=found + num_inside,
            copied_block_ids=tuple(copied),
            num_inside_tokens=num_inside,
        )

    def _best_inside(self, parent: bytes, rest: Sequence[int]) -> tuple[int | None, int]:
        """The block after ``parent`` that agrees longest with ``rest``, and in how many tokens."""
        best_id, most = None, MIN_INSIDE_TOKENS - 1
        for block_id, num_common in self.index.candidates(parent, rest):
            usable = min(num_common, self._pool.num_filled[block_id])
            if usable > most and block_id not in self._in_flight:
                best_id, most = block_id, usable
        return best_id, most

    # --- register and forget ---------------------------------------------------------------------

    def register(
        self,
        block_id: int,
        chain: HashChain,
        index: int,
        token_ids: Sequence[int],
        group: int = 0,
        *,
        in_flight: bool,
    ) -> None:
        """Make full block ``index`` of a sequence findable, unless another with its content is."""
        known = self.index.get(block_id)
        if known is not None and known.name is not None:
            return
        size = self._block_size
        name, parent = chain.hash_of(index, token_ids, size), chain.parent_of(index)
        if group:  # most models have one, and this is done for every block
            name, parent = in_group(name, group), in_group(parent, group)
        content = tuple(token_ids[index * size : (index + 1) * size])
        if self.index.add(block_id, IndexedBlock(parent, content, name)):
            self._pool.set_cached(block_id, True)
            if in_flight:
                self._in_flight.add(block_id)

    def register_tail(
        self,
        block_id: int,
        chain: HashChain,
        index: int,
        token_ids: Sequence[int],
        num_tokens: int,
        group: int = 0,
    ) -> None:
        """Make the half-full block ``index``, the last of a sequence of ``num_tokens``, findable."""
        known = self.index.get(block_id)
        size = self._block_size
        content = tuple(token_ids[index * size : num_tokens])
        if known is not None and len(known.token_ids) >= len(content):
            return
        if len(content) >= MIN_INSIDE_TOKENS:
            if index:
                chain.hash_of(index - 1, token_ids, size)
            parent = in_group(chain.parent_of(index), group)
            self.index.add(block_id, IndexedBlock(parent, content, None))
            self._pool.set_cached(block_id, True)

    def forget(self, block_id: int) -> None:
        """Let a block not be found any more; who uses it keeps it."""
        if self.index.remove(block_id) is not None:
            self._pool.set_cached(block_id, False)
        self._in_flight.discard(block_id)

    def forget_in_flight(self, block_ids: Iterable[int]) -> None:
        """The writer of these blocks leaves the plan: what it would have filled stays empty."""
        for block_id in self._in_flight.intersection(block_ids):
            self.forget(block_id)

    def commit(self) -> None:
        """The step is done: what was in flight is there."""
        self._in_flight.clear()

    def reset(self) -> None:
        """Let nobody find anything, but preempted requests what they count on."""
        for block_id in range(self._pool.num_blocks):
            self.forget(block_id)
        self.host.clear()

    # --- host tier -------------------------------------------------------------------------------

    def copy_to_host(self, name: bytes, device_block_id: int) -> int | None:
        """The host block with this content, copied there now if need be. ``None``: there is no room."""
        host_id = self.host.find(name, is_holder=True)
        if host_id is None:
            host_id = self.host.store(name)
            if host_id is not None:
                swap = BlockSwap(group_of(name), device_block_id, host_id, to_host=True)
                self.swaps.append(swap)
        return host_id

    def copy_from_host(self, host_id: int, device_block_id: int) -> None:
        group = group_of(self.host.name_of(host_id))
        self.swaps.append(BlockSwap(group, device_block_id, host_id, to_host=False))

    def _evict(self, block_id: int) -> None:
        block = self.index.remove(block_id)
        if block is None:
            raise MemoryInvariantError(f"block {block_id} is evicted and was not cached")
        if block.name is not None and self.host.num_blocks:
            self.copy_to_host(block.name, block_id)
        self.num_evictions += 1
        self._times.evicted(block_id)

    def check(self) -> None:
        """Verify index, pool and host tier against each other.

        Raises:
            MemoryInvariantError: they disagree.
        """
        self.index.check(self._block_size)
        self.host.check()
        if self._in_flight:
            raise MemoryInvariantError("blocks are in flight between two steps")
        for block_id in range(self._pool.num_blocks):
            block = self.index.get(block_id)
            if (block is not None) != self._pool.is_cached(block_id):
                raise MemoryInvariantError(f"pool and prefix index disagree on block {block_id}")
            if block is not None and self._pool.num_filled[block_id] < len(block.token_ids):
                raise MemoryInvariantError(f"block {block_id} is findable and not yet filled")
