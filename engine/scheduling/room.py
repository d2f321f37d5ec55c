"""How many blocks a request needs before it may begin. Reads memory, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from ..memory.kv_cache_manager import KVCacheManager
from ..memory.prefix_cache import PrefixMatch
from .request import Request, Sequence


def num_blocks_wanted(memory: KVCacheManager, request: Request, match: PrefixMatch) -> int:
    """Free blocks that a waiting request takes for the tokens it has.

    Args:
        match: what is there of its first sequence; shared blocks are not taken again.
    """
    leader, *others = request.unfinished
    num_own = _num_own_blocks(memory, others) + request.num_unborn * _num_tail_blocks(
        memory, request
    )
    num_sequences = 1 + len(others) + request.num_unborn
    return memory.num_blocks_taken(match, len(leader.token_ids), num_own, num_sequences)


def num_blocks_owed(memory: KVCacheManager, groups: Iterable[Request]) -> int:
    """Blocks that running requests will need for tokens and sequences that they have already.

    Only requests of several sequences can be owed any: what is left of a step's budget is left when all
    that others have is scheduled.
    """
    owed = 0
    for request in groups:
        for sequence in request.sequences:
            blocks = sequence.blocks
            if blocks is not None and blocks.num_slots < len(sequence.token_ids):
                owed += memory.num_blocks_for(len(sequence.token_ids) - blocks.num_slots)
        own = _num_own_blocks(memory, request.pending)
        own += request.num_unborn * _num_tail_blocks(memory, request)
        owed += own * memory.num_groups
    return owed


def _num_own_blocks(memory: KVCacheManager, sequences: list[Sequence]) -> int:
    """Blocks, of each group, that forked sequences need beside the full blocks of their prompt."""
    size = memory.block_size
    return sum(
        -(-(len(s.token_ids) - s.num_prompt_tokens // size * size) // size) for s in sequences
    )


def _num_tail_blocks(memory: KVCacheManager, request: Request) -> int:
    """Blocks, of each group, that a beam needs for the part of the prompt that fills no block."""
    return int(len(request.new.prompt_token_ids) % memory.block_size > 0)
