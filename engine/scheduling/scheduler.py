"""The scheduler: which tokens of which sequences are computed in the next step.

**The token-budget rule.** A step has no phases. Each sequence is owed ``len(token_ids) -
num_computed_tokens`` tokens: one while it decodes, more while its prompt (or, after a preemption, its
prompt and output) is not computed yet. A step spends at most ``max_num_batched_tokens`` tokens, on
running sequences first, in order of admission, then on waiting requests, first come first served; what
does not fit is computed in chunks over later steps. Chunked prefill, mixed batches and recompute after
preemption are consequences, not cases.

**Admission.** A waiting request is admitted when a seat is free for each of its sequences and all blocks
that its tokens need fit above the watermark, counting what running prompts are still owed. The head of
the queue is never overtaken, so a request of any size is served once those before it end.

**Forks.** The sequences of one request share its prompt. The first computes it, the others have seats and
wait; its last position is sampled once for each, and then they fork: their tables point at the same
blocks. Whoever writes to a shared block first gets a copy (copy-on-write). After a preemption it is the
same again, but for the tokens that each has already.

**Preemption.** When a running sequence needs a block and none is free, the request admitted last gives
back all its blocks and waits again at the head of the queue; its tokens are kept and computed anew.

Must not know tensors, kernels, text or processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from ..memory.kv_cache_manager import KVCacheManager
from ..step import (
    BlockCopy,
    Fork,
    NewRow,
    RowResult,
    ScheduledRow,
    StepPlan,
    StepResult,
)
from .limits import SchedulerCounters, SchedulerLimits, SchedulingError
from .request import NewRequest, Request, Sequence, SequenceStatus, SequenceUpdate
from .updates import appended, failed


class Scheduler:
    """Queues, budget and progress of all requests. ``schedule()`` and ``commit()`` alternate."""

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: KVCacheManager,
        eos_token_ids: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.counters = SchedulerCounters()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._watermark_blocks = int(limits.watermark * memory.pool.num_blocks)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._num_waiting = 0  # sequences of requests in the queue
        self._running: list[Sequence] = []  # in order of admission, a request's sequences adjacent
        self._by_seq_id: dict[int, Sequence] = {}
        self._removed_seq_ids: list[int] = []  # to be told to the executor
        self._forks: list[Fork] = []  # likewise
        self._num_pending = 0  # seats kept for sequences that have not forked yet
        self._next_seq_id = 0
        self._next_step_id = 0

    # --- requests --------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        """Whether ``schedule()`` has anything to say, be it only what the executor may forget."""
        return bool(self._running or self._waiting or self._removed_seq_ids)

    def add(self, new: NewRequest) -> None:
        """Queue a request behind those that came before.

        Raises:
            SchedulingError: its id is in use, or all its sequences have finished.
        """
        if new.request_id in self._requests:
            raise SchedulingError(f"request {new.request_id} is added twice")
        if all(r.is_finished for r in new.resume) and new.resume:
            raise SchedulingError(f"request {new.request_id} has nothing left to compute")
        request = Request(new, self._eos_token_ids)
        max_num_tokens = self.limits.max_model_len
        if new.sampling.max_tokens is not None:
            asked = len(new.prompt_token_ids) + new.sampling.max_tokens
            max_num_tokens = min(asked, max_num_tokens)
        for index in range(new.sampling.num_sequences):
            resumed = new.resume[index].output_token_ids if new.resume else ()
            token_ids = [*new.prompt_token_ids, *resumed]
            sequence = Sequence(self._next_seq_id, request, index, token_ids, max_num_tokens)
            if new.resume and new.resume[index].is_finished:
                sequence.status = SequenceStatus.FINISHED
            request.sequences.append(sequence)
            self._next_seq_id += 1
        self._requests[new.request_id] = request
        self._waiting.append(request)
        self._num_waiting += len(request.unfinished)

    def abort(self, request_id: str) -> bool:
        """Forget a request; its blocks are free when this returns. ``False`` if it is not known."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.is_running:
            self._running = [s for s in self._running if s.request is not request]
            self._clear_pending(request)
        else:
            self._waiting.remove(request)
            self._num_waiting -= len(request.unfinished)
        for sequence in request.unfinished:
            self._drop_blocks(sequence)
            sequence.status = SequenceStatus.FINISHED
        return True

    def abort_sequence(self, request_id: str, child_index: int) -> None:
        """End one sequence of a request; the others go on. Unknown and ended ones are passed over."""
        request = self._requests.get(request_id)
        if request is None:
            return
        sequence = request.sequences[child_index]
        if sequence.status is SequenceStatus.FINISHED:
            return
        if len(request.unfinished) == 1:
            self.abort(request_id)
            return
        if request.pending:  # back to the queue, where no sequence depends on another
            self._suspend(request)
        if request.is_running:
            self._running.remove(sequence)
        else:
            self._num_waiting -= 1
        self._drop_blocks(sequence)
        sequence.status = SequenceStatus.FINISHED

    # --- schedule --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Spend the token budget and return the step to execute."""
        budget = self.limits.max_num_batched_tokens
        num_preemptions = self.counters.num_preemptions
        copies: dict[int, list[BlockCopy]] = {}
        rows, budget = self._schedule_running(budget, copies)
        new_rows: list[NewRow] = []
        if self._waiting and self.counters.num_preemptions == num_preemptions:
            for row, new_row in self._admit(budget):
                rows.append(row)
                new_rows.append(new_row)
        if not rows and (self._running or self._waiting):
            raise SchedulingError("there is work, and nothing of it can be scheduled")
        removed, self._removed_seq_ids = self._removed_seq_ids, []
        plan = StepPlan(
            step_id=self._next_step_id,
            forks=self._take_forks(),
            removed_seq_ids=tuple(removed),
            new_rows=tuple(new_rows),
            block_copies=tuple(copy for own in copies.values() for copy in own),
            rows=tuple(rows),
        )
        self._next_step_id += 1
        return plan

    def _take_forks(self) -> tuple[Fork, ...]:
        """Forks whose child still lives; the executor knows it from this plan on."""
        forks, self._forks = self._forks, []
        alive = tuple(fork for fork in forks if fork.child_seq_id in self._by_seq_id)
        for fork in alive:
            self._by_seq_id[fork.child_seq_id].is_known = True
        return alive

    def _schedule_running(
        self, budget: int, copies: dict[int, list[BlockCopy]]
    ) -> tuple[list[ScheduledRow], int]:
        rows: list[ScheduledRow] = []
        running = self._running
        position = 0
        while position < len(running) and budget:
            sequence = running[position]
            start = sequence.num_computed_tokens
            count = min(len(sequence.token_ids) - start, budget)
            if sequence.request.pending:
                count = min(count, sequence.num_prompt_tokens - start)
            blocks = sequence.blocks
            has_room = blocks is not None and start + count <= blocks.num_slots
            is_alone = len(sequence.request.sequences) == 1
            if not (has_room and is_alone) and not self._make_room(sequence, start, count, copies):
                for victim in self._preempt(running[-1].request, rows):
                    copies.pop(victim, None)
                if position >= len(running):
                    break
                continue
            rows.append(self._row(sequence, start, count))
            budget -= count
            position += 1
        return rows, budget

    def _make_room(
        self, sequence: Sequence, start: int, count: int, copies: dict[int, list[BlockCopy]]
    ) -> bool:
        """Blocks for ``count`` tokens from ``start`` on that nobody else sees. ``False``: none free."""
        blocks, memory = sequence.blocks, self.memory
        if blocks is None:
            raise SchedulingError(f"running sequence {sequence.seq_id} has no blocks")
        if len(sequence.request.sequences) > 1:
            made = memory.make_writable(blocks, start)
            if made is None:
                return False
            if made:
                copies.setdefault(sequence.seq_id, []).extend(made)
        return start + count <= blocks.num_slots or memory.grow(blocks, start + count)

    def _row(self, sequence: Sequence, start: int, count: int) -> ScheduledRow:
        blocks, request = sequence.blocks, sequence.request
        if blocks is None:
            raise SchedulingError(f"sequence {sequence.seq_id} is scheduled without blocks")
        first_changed = blocks.first_changed_block
        tables = blocks.tables
        blocks.first_changed_block = len(tables[0])
        num_samples = 1 if start + count == len(sequence.token_ids) else 0
        if request.pending and num_samples:
            num_samples += request.pending[-1].index - sequence.index  # sample i has seed + i
        if not sequence.unsent_token_ids:
            return ScheduledRow(sequence.seq_id, start, count, num_samples, tables, first_changed)
        unsent, sequence.unsent_token_ids = sequence.unsent_token_ids, []
        return ScheduledRow(
            sequence.seq_id,
            start,
            count,
            num_samples,
            tables,
            first_changed,
            appended_token_ids=tuple(unsent),
        )

    def _admit(self, budget: int) -> Iterator[tuple[ScheduledRow, NewRow]]:
        while self._waiting and budget > 0:
            request = self._waiting[0]
            sequences = request.unfinished
            num_seats = len(self._running) + self._num_pending + len(sequences)
            if num_seats > self.limits.max_num_seqs or not self._fits(request):
                return
            self._waiting.popleft()
            self._num_waiting -= len(sequences)
            if request.scheduled_time is None:
                request.scheduled_time = self._clock()
            leader, *request.pending = sequences
            self._num_pending += len(request.pending)
            count = min(len(leader.token_ids), budget)
            if request.pending:
                count = min(count, leader.num_prompt_tokens)
            budget -= count
            self._start(leader)
            yield self._first_row(leader, count)

    def _fits(self, request: Request) -> bool:
        """Whether all blocks of ``request`` fit above the watermark (see the module's rule)."""
        leader, *others = request.unfinished
        needed = self.memory.num_blocks_for(len(leader.token_ids)) + self._num_own_blocks(others)
        free = self.memory.pool.num_free_blocks
        if not self._running:
            return needed <= free
        owed = sum(
            self.memory.num_blocks_for(len(s.token_ids) - s.blocks.num_slots)
            for s in self._running
            if s.blocks is not None and s.blocks.num_slots < len(s.token_ids)
        )
        owed += sum(
            self._num_own_blocks(s.request.pending) for s in self._running if s.request.pending
        )
        return needed + owed + self._watermark_blocks <= free

    def _num_own_blocks(self, sequences: list[Sequence]) -> int:
        """Blocks that forked sequences need beside the full blocks of their prompt."""
        size = self.memory.block_size
        return sum(
            self.memory.num_blocks_for(len(s.token_ids) - s.num_prompt_tokens // size * size)
            for s in sequences
        )

    def _start(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        sequence.blocks = self.memory.open(sequence.seq_id)
        self._running.append(sequence)
        self._by_seq_id[sequence.seq_id] = sequence

    def _first_row(self, sequence: Sequence, count: int) -> tuple[ScheduledRow, NewRow]:
        if sequence.blocks is None or not self.memory.grow(sequence.blocks, count):
            raise SchedulingError("a request was admitted without room for its first tokens")
        sequence.is_known = True
        new = sequence.request.new
        new_row = NewRow(
            sequence.seq_id,
            new.prompt_token_ids,
            sequence.output_token_ids,
            new.sampling,
            sequence.seed,
        )
        return self._row(sequence, 0, count), new_row

    def _preempt(self, request: Request, rows: list[ScheduledRow]) -> set[int]:
        """Take all blocks of ``request``, and its rows out of the plan; it waits again, first in line.

        Returns:
            The ids of its sequences.
        """
        if self._running[0].request is request:
            raise SchedulingError(f"request {request.request_id} alone does not fit the pool")
        ids = {sequence.seq_id for sequence in request.sequences}
        while rows and rows[-1].seq_id in ids:
            rows.pop()
        self._suspend(request)
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        return ids

    def _suspend(self, request: Request) -> None:
        """Put a running request back at the head of the queue, without blocks."""
        self._clear_pending(request)
        for sequence in request.unfinished:
            if sequence.status is SequenceStatus.RUNNING:
                self._running.remove(sequence)
                self._drop_blocks(sequence)
            sequence.num_computed_tokens = 0
            sequence.unsent_token_ids = []
            sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(request)
        self._num_waiting += len(request.unfinished)

    def _clear_pending(self, request: Request) -> None:
        self._num_pending -= len(request.pending)
        request.pending = []

    def _drop_blocks(self, sequence: Sequence) -> None:
        """Give back the sequence's memory, here and in the executor."""
        if sequence.blocks is None:
            return
        self.memory.close(sequence.seq_id)
        sequence.blocks = None
        del self._by_seq_id[sequence.seq_id]
        if sequence.is_known:
            self._removed_seq_ids.append(sequence.seq_id)
            sequence.is_known = False

    # --- commit ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[list[SequenceUpdate], int]:
        """Take in what a step computed.

        Returns:
            One update per sequence that got a token or ended, and the step's token count: prompt tokens
            computed plus tokens generated.
        """
        if result.step_id != plan.step_id:
            raise SchedulingError(f"step {plan.step_id} got the result of step {result.step_id}")
        num_prefill_tokens = self._advance(plan)
        self._count(plan)
        updates: list[SequenceUpdate] = []
        for row in result.rows:
            sequence = self._by_seq_id.get(row.seq_id)
            if sequence is not None:
                updates += self._take(sequence, row)
        if self._num_pending:
            self._fork_pending(plan)
        finished = [update for update in updates if update.finish_reason is not None]
        for update in finished:
            self._finish(self._requests[update.request_id], update.child_index)
        if finished:
            self._running = [s for s in self._running if s.status is SequenceStatus.RUNNING]
        self.memory.unpin()
        num_generated = sum(len(update.token_ids) for update in updates)
        self.counters.num_generation_tokens += num_generated
        return updates, num_prefill_tokens + num_generated

    def _fork_pending(self, plan: StepPlan) -> None:
        """Let the others of a request go their own way, where its prompt has been computed."""
        for row in plan.rows:
            leader = self._by_seq_id.get(row.seq_id)
            if leader is None or not leader.request.pending:
                continue
            if leader.num_computed_tokens >= leader.num_prompt_tokens:
                self._fork(leader)

    def _fork(self, leader: Sequence) -> None:
        request, num_tokens = leader.request, leader.num_prompt_tokens
        if leader.blocks is None:
            raise SchedulingError(f"sequence {leader.seq_id} forks without blocks")
        children = [s for s in request.pending if s.status is not SequenceStatus.FINISHED]
        self._clear_pending(request)
        for child in children:
            child.blocks = self.memory.fork(leader.blocks, child.seq_id, num_tokens)
            child.num_computed_tokens = num_tokens
            child.num_counted_prompt_tokens = num_tokens
            child.unsent_token_ids = child.token_ids[num_tokens:]
            child.status = SequenceStatus.RUNNING
            self._by_seq_id[child.seq_id] = child
            self._forks.append(Fork(leader.seq_id, child.seq_id, num_tokens, child.seed))
        after = self._running.index(leader) + 1
        self._running[after:after] = children

    def _advance(self, plan: StepPlan) -> int:
        """Note the plan's rows as computed; return how many of their tokens were prefill."""
        num_prefill_tokens = 0
        for row in plan.rows:
            sequence = self._by_seq_id.get(row.seq_id)
            if sequence is None or sequence.blocks is None:
                continue
            end = row.start + row.num_tokens
            sequence.num_computed_tokens = end
            self.memory.mark_computed(sequence.blocks, end)
            num_prompt_tokens = sequence.num_prompt_tokens
            if row.start < num_prompt_tokens:
                reached = min(end, num_prompt_tokens)
                num_prefill_tokens += reached - row.start
                fresh = reached - sequence.num_counted_prompt_tokens
                if fresh > 0:
                    self.counters.num_prompt_tokens += fresh
                    sequence.num_counted_prompt_tokens = reached
        return num_prefill_tokens

    def _count(self, plan: StepPlan) -> None:
        if not plan.rows:
            return
        counters = self.counters
        counters.num_steps += 1
        counters.num_scheduled_tokens += plan.num_tokens
        counters.num_block_copies += len(plan.block_copies)
        counters.kv_slot_steps_allocated += self.memory.num_allocated_slots
        counters.kv_slot_steps_used += self.memory.num_used_slots

    def _take(self, sequence: Sequence, row: RowResult) -> list[SequenceUpdate]:
        """Give each token of ``row`` to its sequence: the row's own, then those that fork from it."""
        drawn = [sequence]
        if row.error is not None or len(row.token_ids) > 1:
            drawn += sequence.request.pending
        if row.error is not None:
            self.counters.num_nonfinite_rows += 1
            return [failed(one, row.error) for one in drawn]
        updates = []
        for one in drawn:
            sample = one.index - sequence.index
            logprobs = None if row.logprobs is None else row.logprobs[sample]
            updates.append(appended(one, row.token_ids[sample], logprobs))
        return updates

    def _finish(self, request: Request, child_index: int) -> None:
        sequence = request.sequences[child_index]
        self._drop_blocks(sequence)
        sequence.status = SequenceStatus.FINISHED
        if sequence in request.pending:
            request.pending.remove(sequence)
            self._num_pending -= 1
        if not request.unfinished:
            del self._requests[request.request_id]

    def check(self) -> None:
        """Verify memory and the scheduler's own tables.

        Raises:
            MemoryInvariantError, SchedulingError: they contradict each other.
        """
        self.memory.check()
        for sequence in self._running:
            if sequence.status is not SequenceStatus.RUNNING or sequence.blocks is None:
                raise SchedulingError(f"sequence {sequence.seq_id} runs without status or blocks")
            if sequence.blocks.num_tokens != sequence.num_computed_tokens:
                raise SchedulingError(f"sequence {sequence.seq_id}: memory and progress disagree")
        if {s.seq_id for s in self._running} != set(self._by_seq_id):
            raise SchedulingError("running sequences and their index disagree")
        if self._num_waiting != sum(len(request.unfinished) for request in self._waiting):
            raise SchedulingError("the queue's length is miscounted")
        num_pending = sum(len(s.request.pending) for s in self._running)
        if self._num_pending != num_pending:
            raise SchedulingError(
                f"{num_pending} sequences wait to fork, {self._num_pending} counted"
            )
        live = {request.request_id for request in self._waiting}
        live |= {sequence.request.request_id for sequence in self._running}
        if live != set(self._requests):
            raise SchedulingError("a request is neither running nor waiting")
        if not self._requests and self.memory.pool.num_used_blocks:
            raise SchedulingError(f"{self.memory.pool.num_used_blocks} blocks are used by nobody")
