"""A picture of the KV memory, as callers may ask for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One block of the device pool."""

    id: int
    ref_count: int  # block tables that point at it
    num_filled: int  # leading slots whose keys and values are valid
    is_cached: bool  # findable by its content
    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVSequence:
    """One sequence and where its keys and values lie."""

    request_id: str
    seq_id: int
    status: str  # "running", "waiting" (never computed, or preempted)
    num_tokens: int  # whose keys and values were computed
    block_table: tuple[int, ...]  # of all KV groups, without blocks that fell out of a window


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """KV memory between two steps."""

    num_blocks: int
    block_size: int
    blocks: tuple[KVBlock, ...]
    sequences: tuple[KVSequence, ...]
