"""The host tier: KV blocks in host memory, found by the name of their content.

An entry is held while a preempted request counts on it; others are evicted prefixes, which stay while
there is room. Knows names and host block ids only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .block_pool import MemoryInvariantError


class HostTier:
    """``num_blocks`` host blocks, each empty or with one named content. Every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._holds: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # not held, least recently used first

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are empty or can be emptied."""
        return len(self._free) + len(self._kept)

    def find(self, name: bytes) -> int | None:
        """The host block with this content."""
        return self._by_name.get(name)

    def store(self, name: bytes) -> int | None:
        """A host block to write this content to, which is not there yet. ``None``: all are held."""
        if name in self._by_name:
            raise MemoryInvariantError("one content is stored twice in the host tier")
        if self._free:
            host_id = self._free.pop()
        elif self._kept:
            host_id, _ = self._kept.popitem(last=False)
            del self._by_name[self._names[host_id]]
        else:
            return None
        self._by_name[name] = host_id
        self._names[host_id] = name
        self._kept[host_id] = None
        return host_id

    def hold(self, host_id: int) -> None:
        """Keep an entry until :meth:`release`, called as often."""
        self._holds[host_id] = self._holds.get(host_id, 0) + 1
        self._kept.pop(host_id, None)

    def release(self, host_ids: Iterable[int], *, keep: bool = True) -> None:
        """Give up holds. Entries that nobody holds stay while there is room, or leave at once."""
        for host_id in host_ids:
            self._holds[host_id] -= 1
            if self._holds[host_id]:
                continue
            del self._holds[host_id]
            if keep:
                self._kept[host_id] = None
            else:
                self._empty(host_id)

    def clear(self) -> None:
        """Forget every entry that nobody holds."""
        for host_id in self._kept:
            self._empty(host_id)
        self._kept.clear()

    def _empty(self, host_id: int) -> None:
        del self._by_name[self._names.pop(host_id)]
        self._free.append(host_id)

    def check(self) -> None:
        """Verify that each host block is free, kept or held.

        Raises:
            MemoryInvariantError: it is not so.
        """
        states = [*self._free, *self._kept, *self._holds]
        if sorted(states) != list(range(self.num_blocks)):
            raise MemoryInvariantError("a host block is in two states, or in none")
        if {name: host_id for host_id, name in self._names.items()} != self._by_name:
            raise MemoryInvariantError("names and blocks of the host tier disagree")
        if set(self._names) != {*self._kept, *self._holds}:
            raise MemoryInvariantError("a free host block has a name, or a used one has none")
