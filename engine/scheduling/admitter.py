"""Admission: which waiting requests begin, and what each of them begins with.

A waiting request is admitted when a seat is free for each of its sequences and all blocks that its tokens
need fit above the watermark, less what the prefix cache has of them, counting what running requests are
still owed. While nothing runs there is no watermark. The head of the queue is never overtaken. Where
requests have priorities, running ones of a lower priority make way for it if it can begin with what they have.

A request that wants its prompt's log-probabilities uses the prefix cache only up to what is known of them.
One that wants the mean of its prompt's hidden states does not use it: the cache has none of these. (An
embedding of the last token needs only that token's.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from ..memory.kv_cache_manager import KVCacheManager
from ..memory.prefix_cache import PrefixMatch
from .limits import SchedulerCounters, SchedulerLimits, SchedulingError
from .request import Request, Sequence
from .request_table import RequestTable
from .room import num_blocks_owed, num_blocks_wanted
from .step_draft import StepDraft

RETRY_STEPS = 16
"""Steps after which a request that did not fit is looked up again, whether blocks were freed or not."""


def _makes_way(running: Request, head: Request) -> bool:
    """Whether a running request is preempted for the head of the queue, if need be."""
    return running.new.priority > head.new.priority and running.rank > head.rank


@dataclass(slots=True)
class _Wait:
    """Why the head of the queue was not admitted."""

    request: Request
    num_blocks: int  # free ones that it needs
    num_steps: int = 0


@dataclass(slots=True)
class _NoWay:
    """Who could not begin even if all of a lower priority made way."""

    request: Request
    num_running: int
    num_steps: int = 0


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
        self._wait: _Wait | None = None
        self._no_way: _NoWay | None = None

    def admit(self, draft: StepDraft) -> None:
        """Admit from the head of the queue, as long as there are seats, blocks and budget."""
        waiting = self._table.waiting
        while waiting and draft.has_room:
            request = waiting[0]
            if not self._has_seats(request) or self._is_hopeless(request):
                return
            matches = self._matches(request)
            if matches[0].copied_block_ids and not self._fits(request, matches[0]):
                matches[0] = matches[0].without_copy()
            if not self._fits(request, matches[0]):
                return
            waiting.popleft()
            self._table.num_waiting -= len(request.unfinished)
            self._begin(request, matches, draft)

    def victims(self) -> list[Request]:
        """Running requests to preempt so that the head of the queue can begin, the last in order first.

        Empty if it can begin without that, or not even with it. The queues are in order of priority.
        """
        head, running = self._table.waiting[0], self._table.running
        if not running or not _makes_way(running[-1].request, head) or self._has_no_way(head):
            return []
        match = self._matches(head)[0].without_copy()
        num_seats = self._num_seats_wanted(head) - self._limits.max_num_seqs
        num_blocks = self._num_blocks_wanted(head, match) - self._memory.pool.num_free_blocks
        found: list[Request] = []
        num_left, freed = len(running), _Freed(self._memory, match)
        while num_left and (num_seats > 0 or num_blocks > 0):
            request = running[num_left - 1].request
            if not _makes_way(request, head):
                self._no_way = _NoWay(head, len(running))
                return []
            found.append(request)
            num_left -= sum(s.blocks is not None for s in request.unfinished)
            num_seats -= len(request.unfinished) + request.num_unborn
            num_blocks -= freed.by(request) + num_blocks_owed(self._memory, [request])
        return found

    def _has_no_way(self, head: Request) -> bool:
        """Whether it was found out lately, and nothing has ended since."""
        known, num_running = self._no_way, len(self._table.running)
        if known is None or known.request is not head or known.num_running != num_running:
            return False
        known.num_steps += 1
        return known.num_steps % RETRY_STEPS != 0

    def _is_hopeless(self, request: Request) -> bool:
        """Whether what kept the head of the queue out is sure to last.

        Looking it up again costs time in every step. It is done when as many blocks are free as were
        missing, and now and then, since the prefix cache may have more of it by then.
        """
        wait = self._wait
        if wait is None or wait.request is not request or not self._table.running:
            return False
        wait.num_steps += 1
        is_due = wait.num_steps % RETRY_STEPS == 0
        return not is_due and self._memory.pool.num_free_blocks < wait.num_blocks

    def _has_seats(self, request: Request) -> bool:
        return self._num_seats_wanted(request) <= self._limits.max_num_seqs

    def _num_seats_wanted(self, request: Request) -> int:
        """Seats that are taken, and those of a waiting request."""
        taken = len(self._table.running) + sum(
            r.num_reserved_seats for r in self._table.groups.values()
        )
        return taken + len(request.unfinished) + request.num_unborn

    def _matches(self, request: Request) -> list[PrefixMatch]:
        """What is there of the first sequence, or of all of them if they can come back together.

        They can if all were swapped out with their prompt, and are still there with it.
        """
        sequences = request.unfinished
        num_prompt_tokens = len(request.new.prompt_token_ids)
        are_complete = all(s.num_swapped_tokens >= num_prompt_tokens for s in sequences)
        if request.host_block_ids and len(sequences) > 1 and are_complete:
            matches = [self._match(s, is_back=True) for s in sequences]
            if all(m.num_tokens >= num_prompt_tokens for m in matches):
                return matches
        return [self._match(sequences[0], is_back=False)]

    def _match(self, sequence: Sequence, *, is_back: bool) -> PrefixMatch:
        num_tokens = self._num_wanted(sequence, is_back=is_back)
        if sequence.request.is_unscored:  # the token before the next one to score is computed
            num_tokens = min(num_tokens, sequence.request.num_scored_tokens - 1)
        elif sequence.request.is_mean_pooled:
            num_tokens = 0
        num_swapped = min(sequence.num_swapped_tokens, num_tokens)
        return self._memory.match(sequence.chain, sequence.token_ids, num_tokens, num_swapped)

    def _num_wanted(self, sequence: Sequence, *, is_back: bool) -> int:
        """Tokens to have computed before a sequence is sampled or others fork from it."""
        is_leader = not is_back and len(sequence.request.unfinished) > 1
        return sequence.num_prompt_tokens if is_leader else len(sequence.token_ids)

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        """Whether all blocks of ``request`` fit above the watermark (see the module's rule)."""
        wanted = self._num_blocks_wanted(request, match)
        if wanted <= self._memory.pool.num_free_blocks:
            self._wait = None
            return True
        self._wait = _Wait(request, wanted)
        return False

    def _num_blocks_wanted(self, request: Request, match: PrefixMatch) -> int:
        """Blocks that have to be free for ``request`` to begin."""
        wanted = num_blocks_wanted(self._memory, request, match)
        if self._table.running:
            wanted += num_blocks_owed(self._memory, self._table.groups.values())
            wanted += self._watermark_blocks
        return wanted

    def _begin(self, request: Request, matches: list[PrefixMatch], draft: StepDraft) -> None:
        """Admit a request: the first sequence alone, or all that were swapped out together."""
        leader, *others = request.unfinished
        is_back = len(matches) > 1
        if not is_back:
            request.pending = others
        if others or request.beam_search is not None:
            self._table.groups[request.request_id] = request
        if request.scheduled_time is None:
            request.scheduled_time = self._clock()
            self._count_hits(request, matches[0])
        self._start(leader, matches[0], draft, is_back=is_back)
        if is_back:
            for sequence in others:  # which share what the first ones have brought back
                match = self._match(sequence, is_back=True).without_copy()
                self._start(sequence, match, draft, is_back=True)
        self._table.release_host_blocks(request)

    def _count_hits(self, request: Request, match: PrefixMatch) -> None:
        is_blind = request.is_unscored or request.is_mean_pooled
        if is_blind or not self._memory.enable_prefix_caching:
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
        count = draft.most(num_wanted - start)
        if count and not self._memory.grow(blocks, start + count):
            raise SchedulingError("a request was admitted without room for its first tokens")
        if count:
            draft.put(sequence, start, count)


class _Freed:
    """Counts the blocks that are free when one request after the other has given back its own."""

    def __init__(self, memory: KVCacheManager, match: PrefixMatch) -> None:
        self._ref_counts = memory.pool.ref_counts
        self._left: dict[int, int] = {}  # references that stay
        self._wanted = frozenset(chain.from_iterable(match.device_block_ids))
        """Which the newcomer takes at once."""

    def by(self, request: Request) -> int:
        """Blocks that nobody has any more after ``request``."""
        num_freed = 0
        for sequence in request.sequences:
            for block_id in sequence.blocks.all_held() if sequence.blocks is not None else ():
                left = self._left.get(block_id, self._ref_counts[block_id]) - 1
                self._left[block_id] = left
                num_freed += left == 0 and block_id not in self._wanted
        return num_freed
