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
from .block_hash import HashChain, hash_block
from .block_pool import BlockPool, MemoryInvariantError
from .block_times import BlockTimes
from .host_index import HostIndex
from .prefix_index import MIN_INSIDE_TOKENS, IndexedBlock, PrefixIndex


class PrefixMatch(NamedTuple):
    """What is there of a sequence's first tokens. Nothing is taken by looking."""

    num_tokens: int = 0  # found in all
    device_block_ids: tuple[
        int, ...
    ] = ()  # full blocks, from the first on; those in the host tier: -1
    host_block_ids: tuple[int, ...] = ()  # of the blocks marked -1, in order
    copied_block_id: int | None = None  # after them: a device block that agrees in its first tokens
    host_tail_id: int | None = None  # or the half-full last block of a sequence swapped out
    num_inside_tokens: int = 0  # found in the copied block
    num_host_tokens: int = 0  # found in the host tier

    def without_copy(self) -> PrefixMatch:
        """The same without the hit inside a block, which needs a block more while it is copied."""
        return self._replace(
            num_tokens=self.num_tokens - self.num_inside_tokens,
            copied_block_id=None,
            num_inside_tokens=0,
        )


class PrefixCache:
    """Finds, registers and forgets blocks by content, over one pool and one host tier.

    Args:
        pool: the device blocks.
        block_size: tokens in a block.
        host: the host tier; of no blocks if there is none.
        times: notes evictions.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, host: HostIndex, times: BlockTimes
    ) -> None:
        self.index = PrefixIndex()
        self.host = host
        self.num_evictions = 0
        self.swaps: list[BlockSwap] = []
        """Moves that the next plan has to make, in order."""
        self._pool = pool
        self._block_size = block_size
        self._times = times
        self._in_flight: set[int] = set()
        pool.on_evict = self._evict

    # --- look ------------------------------------------------------------------------------------

    def match(
        self, chain: HashChain, token_ids: Sequence[int], num_tokens: int, num_swapped: int = 0
    ) -> PrefixMatch:
        """The longest cached prefix of the first ``num_tokens`` of ``token_ids``.

        Args:
            chain: names of the sequence's blocks.
            num_swapped: tokens that the sequence had when it was swapped out.
        """
        size = self._block_size
        device: list[int] = []
        host: list[int] = []
        for index in range(num_tokens // size):
            name = chain.hash_of(index, token_ids, size)
            block_id = self.index.find(name)
            if block_id is None:
                host_id = self.host.find(name, is_holder=num_swapped > 0)
                if host_id is None:
                    break
                host.append(host_id)
                block_id = -1
            device.append(block_id)
        found = len(device) * size
        match = PrefixMatch(found, tuple(device), tuple(host), num_host_tokens=len(host) * size)
        if found < num_swapped < found + size:
            tail = token_ids[found:num_swapped]
            tail_name = hash_block(chain.parent_of(len(device)), tail)
            tail_id = self.host.find(tail_name, is_holder=True)
            if tail_id is not None:
                num_host = match.num_host_tokens + len(tail)
                return match._replace(
                    num_tokens=num_swapped, host_tail_id=tail_id, num_host_tokens=num_host
                )
        return self._with_inside(match, chain, token_ids, num_tokens)

    def _with_inside(
        self, match: PrefixMatch, chain: HashChain, token_ids: Sequence[int], num_tokens: int
    ) -> PrefixMatch:
        """Add the block that agrees longest in its first tokens; the last token is left to compute."""
        found = match.num_tokens
        rest = token_ids[found : max(found, min(num_tokens - 1, found + self._block_size))]
        if len(rest) < MIN_INSIDE_TOKENS:
            return match
        best_id, most = None, MIN_INSIDE_TOKENS - 1
        parent = chain.parent_of(len(match.device_block_ids))
        for block_id, num_common in self.index.candidates(parent, rest):
            usable = min(num_common, self._pool.num_filled[block_id])
            if usable > most and block_id not in self._in_flight:
                best_id, most = block_id, usable
        if best_id is None:
            return match
        return match._replace(
            num_tokens=found + most, copied_block_id=best_id, num_inside_tokens=most
        )

    # --- register and forget ---------------------------------------------------------------------

    def register(
        self,
        block_id: int,
        chain: HashChain,
        index: int,
        token_ids: Sequence[int],
        *,
        in_flight: bool,
    ) -> None:
        """Make full block ``index`` of a sequence findable, unless another with its content is."""
        known = self.index.get(block_id)
        if known is not None and known.name is not None:
            return
        size = self._block_size
        name = chain.hash_of(index, token_ids, size)
        content = tuple(token_ids[index * size : (index + 1) * size])
        if self.index.add(block_id, IndexedBlock(chain.parent_of(index), content, name)):
            self._pool.set_cached(block_id, True)
            if in_flight:
                self._in_flight.add(block_id)

    def register_tail(
        self, block_id: int, chain: HashChain, index: int, token_ids: Sequence[int], num_tokens: int
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
            self.index.add(block_id, IndexedBlock(chain.parent_of(index), content, None))
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
                self.swaps.append(BlockSwap(0, device_block_id, host_id, to_host=True))
        return host_id

    def copy_from_host(self, host_id: int, device_block_id: int) -> None:
        self.swaps.append(BlockSwap(0, device_block_id, host_id, to_host=False))

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
