"""Names for the content of KV blocks: a chain of cryptographic hashes over token ids.

The keys and values of a block depend on its tokens and on all tokens before it. So a block's name is the
hash of its parent's name and its own tokens; equal names mean equal content. SHA-256, so that nobody can
construct a prompt that hits another's blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_HASH_SIZE = hashlib.sha256().digest_size
_GROUP_SIZE = 2  # bytes of a KV group's number


def root_hash(cache_salt: str | None) -> bytes:
    """Where a chain begins. Chains with different roots never meet."""
    salt = "" if cache_salt is None else f"salt {cache_salt}"
    return hashlib.sha256(f"octavo {salt}".encode()).digest()


def in_group(name: bytes, group: int) -> bytes:
    """The name of the same tokens' block in a KV group: a chain is hashed once for all of them."""
    return name + group.to_bytes(_GROUP_SIZE, "little") if group else name


def group_of(name: bytes) -> int:
    """The KV group of the block with this name."""
    return int.from_bytes(name[_HASH_SIZE:], "little")


def private_root_hash(name: str) -> bytes:
    """A root that no other request has, for blocks that only their owner may find again."""
    return hashlib.sha256(f"octavo private {name}".encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a block that holds ``token_ids`` after the block named ``parent``, of its group."""
    return _hash(parent[:_HASH_SIZE], array("I", token_ids).tobytes()) + parent[_HASH_SIZE:]


def _hash(parent: bytes, packed: bytes) -> bytes:
    return hashlib.sha256(parent + packed).digest()


class HashChain:
    """The names of one sequence's full blocks in group 0, computed when they are asked for.

    Args:
        root: where the chain begins.
        hashes: of the first blocks, where they are known.
    """

    __slots__ = ("hashes", "root")

    def __init__(self, root: bytes, hashes: list[bytes] | None = None) -> None:
        self.root = root
        self.hashes: list[bytes] = hashes or []

    def parent_of(self, index: int) -> bytes:
        """The name before block ``index``; blocks up to there have theirs."""
        return self.hashes[index - 1] if index else self.root

    def hash_of(self, index: int, token_ids: Sequence[int], block_size: int) -> bytes:
        """The name of full block ``index`` of a sequence of ``token_ids``."""
        hashes = self.hashes
        if len(hashes) <= index:
            first, last = len(hashes) * block_size, (index + 1) * block_size
            packed = array("I", token_ids[first:last]).tobytes()
            size = 4 * block_size
            parent = self.parent_of(len(hashes))
            for begin in range(0, len(packed), size):
                parent = _hash(parent, packed[begin : begin + size])
                hashes.append(parent)
        return hashes[index]

    def fork(self, num_blocks: int) -> HashChain:
        """The chain of a sequence that shares the first ``num_blocks`` full blocks."""
        return HashChain(self.root, self.hashes[:num_blocks])
