"""The host tier's books: KV blocks in host memory, found by the name of their content.

An entry is held while a preempted request counts on it; others are evicted prefixes, which stay while
there is room. A private entry is found by those who hold it only, and leaves with the last of them. Knows
names and host block ids only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .block_pool import MemoryInvariantError


class HostIndex:
    """``num_blocks`` host blocks, each empty or with one named content. Every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._holds: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # not held, least recently used first
        self._private: set[int] = set()  # held, and for nobody else

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are empty or can be emptied."""
        return len(self._free) + len(self._kept)

    def find(self, name: bytes, *, is_holder: bool = False) -> int | None:
        """The host block with this content; a private one for those who hold it only."""
        host_id = self._by_name.get(name)
        return host_id if is_holder or host_id not in self._private else None

    def name_of(self, host_id: int) -> bytes:
        """The name of a host block's content."""
        return self._names[host_id]

    def private_names(self, host_ids: Iterable[int]) -> set[bytes]:
        """Names of those of these entries that are private."""
        return {self._names[host_id] for host_id in self._private.intersection(host_ids)}

    def make_private(self, name: bytes) -> None:
        """Let nobody find this content any more but those who hold it."""
        host_id = self._by_name.get(name)
        if host_id is None:
            return
        if host_id in self._holds:
            self._private.add(host_id)
        else:
            del self._kept[host_id]
            self._empty(host_id)

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

    def release(self, host_ids: Iterable[int]) -> None:
        """Give up holds. Entries that nobody holds stay while there is room; private ones leave."""
        for host_id in host_ids:
            self._holds[host_id] -= 1
            if self._holds[host_id]:
                continue
            del self._holds[host_id]
            if host_id in self._private:
                self._private.remove(host_id)
                self._empty(host_id)
            else:
                self._kept[host_id] = None

    def clear(self) -> None:
        """Let nobody find anything; what is held stays for those who hold it."""
        for name in list(self._by_name):
            self.make_private(name)

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
        if not self._private <= set(self._holds):
            raise MemoryInvariantError("a host block is private and nobody holds it")
        if set(self._names) != {*self._kept, *self._holds}:
            raise MemoryInvariantError("a free host block has a name, or a used one has none")
