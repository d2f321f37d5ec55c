"""All live requests and what becomes of their sequences: waiting, running, forked, suspended, ended.

Owns the queues and gives sequences their blocks and takes them back. Decides nothing: who runs, who waits
and who is preempted is the business of its callers.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from ..memory.block_hash import HashChain, private_root_hash, root_hash
from ..memory.block_table import SequenceBlocks
from ..memory.kv_cache_manager import KVCacheManager
from ..step import Fork
from .fair_share import FairShare
from .limits import SchedulingError
from .request import NewRequest, Rank, Request, Sequence, SequenceStatus


class RequestTable:
    """The queues. A request is in ``waiting``, or its sequences are in ``running``.

    Args:
        memory: of all sequences.
        is_by_priority: both queues are in order of rank, else of arrival and of admission.
        aging_s: of waiting that is worth one step of priority; 0: priorities are strict.
        fair_share: ranks requests, in place of their priorities.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        *,
        is_by_priority: bool = False,
        aging_s: float = 0.0,
        fair_share: FairShare | None = None,
    ) -> None:
        self.memory = memory
        self._fair_share = fair_share
        self.is_by_priority = is_by_priority
        self._aging_ns = int(aging_s * 1e9)
        self._num_added = 0
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.num_waiting = 0
        """Sequences of the requests that wait."""
        self.running: list[Sequence] = []
        """In order of admission, or of rank; a request's sequences adjacent."""
        self.by_seq_id: dict[int, Sequence] = {}
        """Sequences with blocks."""
        self.groups: dict[str, Request] = {}
        """Running requests of several sequences, or of beams."""
        self._removed_seq_ids: list[int] = []  # to be told to the executor
        self._forks: list[Fork] = []  # likewise
        self._next_seq_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._removed_seq_ids)

    # --- a request comes and goes ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request at its place, with the sequences that it begins with."""
        new = request.new
        root = self._root_hash(new)
        for index in range(1 if request.beam_search else new.sampling.num_sequences):
            resumed = new.resume[index].output_token_ids if new.resume else ()
            token_ids = [*new.prompt_token_ids, *resumed]
            sequence = self.new_sequence(request, index, token_ids, HashChain(root))
            if new.resume and new.resume[index].is_finished:
                sequence.status = SequenceStatus.FINISHED
            request.sequences.append(sequence)
        self.requests[new.request_id] = request
        if self.is_by_priority:
            request.rank = self._rank(new)
            insort(self.waiting, request, key=_rank_of)
        else:
            self.waiting.append(request)
        self.num_waiting += len(request.unfinished)

    def _rank(self, new: NewRequest) -> Rank:
        """All that wait grow older alike, so that a request's place among them never changes."""
        self._num_added += 1
        if self._fair_share is not None:
            return self._fair_share.tag(new), self._num_added
        if not self._aging_ns:
            return new.priority, self._num_added
        return new.priority * self._aging_ns + int(new.arrival_time * 1e9), self._num_added

    def _root_hash(self, new: NewRequest) -> bytes:
        if self.memory.enable_prefix_caching:
            return root_hash(new.cache_salt)
        return private_root_hash(f"{self._next_seq_id} {new.request_id}")

    def new_sequence(
        self, request: Request, index: int, token_ids: list[int], chain: HashChain
    ) -> Sequence:
        self._next_seq_id += 1
        return Sequence(self._next_seq_id - 1, request, index, token_ids, chain)

    def remove(self, request: Request) -> None:
        """Forget a request; its blocks are free when this returns."""
        if request.is_running:
            self.running = [s for s in self.running if s.request is not request]
        else:
            self.waiting.remove(request)
            self.num_waiting -= len(request.unfinished)
        self.release_host_blocks(request)
        for sequence in request.unfinished:
            self.end(sequence)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """A request without unfinished sequences is over."""
        self.groups.pop(request.request_id, None)
        if self.requests.pop(request.request_id, None) is not None and self._fair_share is not None:
            self._fair_share.ended(request)

    def begun(self, request: Request) -> None:
        """A request runs for the first time."""
        if self._fair_share is not None:
            self._fair_share.begun(request.rank[0])

    def end(self, sequence: Sequence, *, is_kept: bool = True) -> None:
        """A sequence is finished. The caller takes it out of ``running``."""
        self.drop_blocks(sequence, is_kept=is_kept)
        sequence.status = SequenceStatus.FINISHED

    def drop_finished(self) -> None:
        self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]

    # --- a sequence runs and waits ---------------------------------------------------------------

    def start(self, sequence: Sequence) -> SequenceBlocks:
        """Let a sequence run, with empty tables."""
        sequence.status = SequenceStatus.RUNNING
        blocks = sequence.blocks = self.memory.open(sequence.seq_id, sequence.chain)
        if self.is_by_priority:
            place = bisect_right(self.running, sequence.request.rank, key=_request_rank_of)
            self.running.insert(place, sequence)
        else:
            self.running.append(sequence)
        self.by_seq_id[sequence.seq_id] = sequence
        return blocks

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let ``child`` begin with the first ``num_tokens`` tokens of ``parent``, in its blocks.

        The caller puts it into ``running``.
        """
        child.blocks = self.memory.fork(parent.live_blocks, child.seq_id, num_tokens)
        child.chain = child.blocks.chain
        child.num_computed_tokens = num_tokens
        child.unsent_token_ids = child.token_ids[num_tokens:]
        child.status = SequenceStatus.RUNNING
        self.by_seq_id[child.seq_id] = child
        self._forks.append(Fork(parent.seq_id, child.seq_id, num_tokens, child.seed))

    def replace_running(self, old: list[Sequence], new: list[Sequence]) -> None:
        """Put ``new`` where the adjacent ``old`` are."""
        first = self.running.index(old[0])
        self.running[first : first + len(old)] = new

    def suspend(self, request: Request) -> None:
        """Put a running request back at the head of the queue, or its place there, without blocks."""
        request.pending = []
        self.groups.pop(request.request_id, None)
        if request.beam_search is not None:
            request.beam_search.forget_candidates()
        for sequence in request.unfinished:
            if sequence.status is SequenceStatus.RUNNING:
                self.running.remove(sequence)
                self.drop_blocks(sequence)
            sequence.num_computed_tokens = 0
            sequence.num_unwritten_tokens = 0
            sequence.unsent_token_ids = []
            sequence.status = SequenceStatus.WAITING
        if self.is_by_priority:
            insort(self.waiting, request, key=_rank_of)
        else:
            self.waiting.appendleft(request)
        self.num_waiting += len(request.unfinished)

    def drop_blocks(self, sequence: Sequence, *, is_kept: bool = True) -> None:
        """Give back the sequence's memory, here and in the executor.

        Args:
            is_kept: keep its half-full last block findable; full ones are anyway.
        """
        if sequence.blocks is None:
            return
        self.memory.close(sequence.seq_id, sequence.token_ids if is_kept else None)
        sequence.blocks = None
        del self.by_seq_id[sequence.seq_id]
        if sequence.is_known:
            self._removed_seq_ids.append(sequence.seq_id)
            sequence.is_known = False

    def release_host_blocks(self, request: Request) -> None:
        """What was swapped out is in the pool again, or not wanted any more."""
        if request.host_block_ids:
            back = [s.blocks for s in request.sequences if s.blocks is not None]
            self.memory.swap_done(request.host_block_ids, back)
            request.host_block_ids = []
        for sequence in request.sequences:
            sequence.num_swapped_tokens = 0

    # --- what the executor has to hear -----------------------------------------------------------

    def take_removed(self) -> tuple[int, ...]:
        """Sequences that the executor may forget."""
        removed, self._removed_seq_ids = self._removed_seq_ids, []
        return tuple(removed)

    def take_forks(self) -> tuple[Fork, ...]:
        """Forks whose child still lives; the executor knows it from this plan on."""
        forks, self._forks = self._forks, []
        alive = tuple(fork for fork in forks if fork.child_seq_id in self.by_seq_id)
        for fork in alive:
            self.by_seq_id[fork.child_seq_id].is_known = True
        return alive

    def check(self) -> None:
        """Verify the queues against each other and against memory.

        Raises:
            SchedulingError: they contradict each other.
        """
        for sequence in self.running:
            if sequence.status is not SequenceStatus.RUNNING or sequence.blocks is None:
                raise SchedulingError(f"sequence {sequence.seq_id} runs without status or blocks")
            num_tokens = sequence.num_computed_tokens + sequence.num_unwritten_tokens
            if sequence.blocks.num_tokens != num_tokens:
                raise SchedulingError(f"sequence {sequence.seq_id}: memory and progress disagree")
        if {s.seq_id for s in self.running} != set(self.by_seq_id):
            raise SchedulingError("running sequences and their index disagree")
        if self.num_waiting != sum(len(request.unfinished) for request in self.waiting):
            raise SchedulingError("the queue's length is miscounted")
        running_ids = {s.request.request_id for s in self.running}
        several = {s.request.request_id for s in self.running if len(s.request.unfinished) > 1}
        if not several <= set(self.groups) <= running_ids:
            raise SchedulingError("requests of several sequences and their index disagree")
        if running_ids | {request.request_id for request in self.waiting} != set(self.requests):
            raise SchedulingError("a request is neither running nor waiting")
        if not self.requests and self.memory.pool.num_used_blocks:
            raise SchedulingError(f"{self.memory.pool.num_used_blocks} blocks are used by nobody")
        if self.is_by_priority:
            _check_order([request.rank for request in self.waiting])
            _check_order([sequence.request.rank for sequence in self.running])


def _rank_of(request: Request) -> Rank:
    return request.rank


def _request_rank_of(sequence: Sequence) -> Rank:
    return sequence.request.rank


def _check_order(ranks: Iterable[Rank]) -> None:
    if any(one > other for one, other in pairwise(ranks)):
        raise SchedulingError("a queue is not in order of priority")
