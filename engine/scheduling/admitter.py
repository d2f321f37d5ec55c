"""Admission: which waiting requests begin, and what each of them begins with.

A waiting request is admitted when a seat is free for each of its sequences and all blocks that its tokens
need fit above the watermark, less what the prefix cache has of them, counting what running prompts are
still owed. The head of the queue is never overtaken.
"""

from __future__ import annotations

from collections.abc import Callable

from ..memory.kv_cache_manager import KVCacheManager
from ..memory.prefix_cache import PrefixMatch
from .limits import SchedulerCounters, SchedulerLimits, SchedulingError
from .request import Request, Sequence
from .request_table import RequestTable
from .room import num_blocks_owed, num_blocks_wanted
from .step_draft import StepDraft


class Admitter:
    """Moves requests from the queue into the step."""

    def __init__(
        self,
        table: RequestTable,
        memory: KVCacheManager,
        limits: SchedulerLimits,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._memory = memory
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._watermark_blocks = int(limits.watermark * memory.pool.num_blocks)

    def admit(self, draft: StepDraft) -> None:
        """Admit from the head of the queue, as long as there are seats, blocks and budget."""
        waiting = self._table.waiting
        while waiting and draft.budget > 0:
            request = waiting[0]
            if not self._has_seats(request):
                return
            is_back = self._can_come_back(request)
            match = self._match(request.unfinished[0], is_back=is_back)
            if match.copied_block_id is not None and not self._fits(request, match):
                match = match.without_copy()
            if not self._fits(request, match):
                return
            waiting.popleft()
            self._table.num_waiting -= len(request.unfinished)
            self._begin(request, match, draft, is_back=is_back)

    def _has_seats(self, request: Request) -> bool:
        taken = len(self._table.running) + sum(
            r.num_reserved_seats for r in self._table.groups.values()
        )
        wanted = len(request.unfinished) + request.num_unborn
        return taken + wanted <= self._limits.max_num_seqs

    def _can_come_back(self, request: Request) -> bool:
        """Whether all sequences were swapped out with their prompt and are still there with it."""
        if not request.host_block_ids:
            return False
        if any(s.num_swapped_tokens < s.num_prompt_tokens for s in request.unfinished):
            return False
        matches = (self._match(s, is_back=True) for s in request.unfinished)
        return all(m.num_tokens >= len(request.new.prompt_token_ids) for m in matches)

    def _match(self, sequence: Sequence, *, is_back: bool) -> PrefixMatch:
        num_tokens = self._num_wanted(sequence, is_back=is_back)
        num_swapped = min(sequence.num_swapped_tokens, num_tokens)
        return self._memory.match(sequence.chain, sequence.token_ids, num_tokens, num_swapped)

    def _num_wanted(self, sequence: Sequence, *, is_back: bool) -> int:
        """Tokens to have computed before a sequence is sampled or others fork from it."""
        is_leader = not is_back and len(sequence.request.unfinished) > 1
        return sequence.num_prompt_tokens if is_leader else len(sequence.token_ids)

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        """Whether all blocks of ``request`` fit above the watermark (see the module's rule)."""
        wanted = num_blocks_wanted(self._memory, request, match)
        free = self._memory.pool.num_free_blocks
        if not self._table.running:
            return wanted <= free
        owed = num_blocks_owed(self._memory, self._table.running)
        return wanted + owed + self._watermark_blocks <= free

    def _begin(
        self, request: Request, match: PrefixMatch, draft: StepDraft, *, is_back: bool
    ) -> None:
        """Admit a request: the first sequence alone, or all that were swapped out together."""
        leader, *others = request.unfinished
        if not is_back:
            request.pending = others
        if others or request.beam_search is not None:
            self._table.groups[request.request_id] = request
        if request.scheduled_time is None:
            request.scheduled_time = self._clock()
            self._count_hits(request, match)
        self._start(leader, match, draft, is_back=is_back)
        if is_back:
            for sequence in others:
                self._start(sequence, self._match(sequence, is_back=True), draft, is_back=True)
        self._table.release_host_blocks(request)

    def _count_hits(self, request: Request, match: PrefixMatch) -> None:
        if not self._memory.enable_prefix_caching:
            return
        num_prompt_tokens, counters = len(request.new.prompt_token_ids), self._counters
        num_hits = min(match.num_tokens, num_prompt_tokens - 1)
        request.num_cached_tokens = num_hits
        counters.prefix_cache_queries += num_prompt_tokens
        counters.prefix_cache_hits += num_hits
        counters.prefix_cache_host_hits += min(match.num_host_tokens, num_hits)
        counters.prefix_cache_inside_block_hits += match.num_inside_tokens

    def _start(
        self, sequence: Sequence, match: PrefixMatch, draft: StepDraft, *, is_back: bool
    ) -> None:
        """Give a sequence what was found of it, and as much of the step as is left."""
        num_wanted = self._num_wanted(sequence, is_back=is_back)
        blocks = self._table.start(sequence)
        draft.prefix_copies += self._memory.attach(blocks, match, sequence.token_ids)
        start = min(match.num_tokens, num_wanted - 1)
        sequence.num_computed_tokens = start
        sequence.num_unwritten_tokens = match.num_tokens - start
        draft.introduce(sequence)
        count = min(num_wanted - start, draft.budget)
        if count and not self._memory.grow(blocks, start + count):
            raise SchedulingError("a request was admitted without room for its first tokens")
        if count:
            draft.put(sequence, start, count)
