"""KV memory as people look at it: every block, every sequence, between two steps."""

from __future__ import annotations

from collections.abc import Iterable

from ..api import KVBlock, KVSequence, KVSnapshot
from ..memory.kv_cache_manager import KVCacheManager
from .request import Request, Sequence


def kv_snapshot(memory: KVCacheManager, requests: Iterable[Request]) -> KVSnapshot:
    """Describe the pool and the sequences of ``requests``. O(blocks + table entries)."""
    sequences = [_sequence(s) for request in requests for s in request.unfinished]
    seq_ids: dict[int, list[int]] = {}
    for sequence in sequences:
        for block_id in sequence.block_table:
            seq_ids.setdefault(block_id, []).append(sequence.seq_id)
    pool = memory.pool
    blocks = tuple(
        KVBlock(
            block_id,
            pool.ref_counts[block_id],
            pool.num_filled[block_id],
            pool.is_cached(block_id),
            tuple(seq_ids.get(block_id, ())),
        )
        for block_id in range(pool.num_blocks)
    )
    return KVSnapshot(pool.num_blocks, memory.block_size, blocks, tuple(sequences))


def _sequence(sequence: Sequence) -> KVSequence:
    blocks = sequence.blocks
    return KVSequence(
        sequence.request.request_id,
        sequence.seq_id,
        sequence.status.value,
        blocks.num_tokens if blocks is not None else 0,
        tuple(blocks.all_held()) if blocks is not None else (),
    )
