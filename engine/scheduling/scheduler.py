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

**Preemption.** When a running sequence needs a block and none is free, the request admitted last gives
back all its blocks and waits again at the head of the queue; its tokens are kept and computed anew.

Must not know tensors, kernels, text or processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..api import FinishReason
from ..errors import OctavoError
from ..memory.kv_cache_manager import KVCacheManager
from ..step import NewRow, RowResult, ScheduledRow, StepPlan, StepResult
from .request import NewRequest, Request, Sequence, SequenceStatus, SequenceUpdate


class SchedulingError(OctavoError):
    """The scheduler's state contradicts itself. The engine must not go on."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold, resolved."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    watermark: float = 0.0  # share of blocks


@dataclass(slots=True)
class SchedulerCounters:
    """Cumulative since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_nonfinite_rows: int = 0
    kv_slot_steps_allocated: int = 0
    kv_slot_steps_used: int = 0


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
            SchedulingError: its id is in use, or it is of a kind that the door refuses.
        """
        if new.request_id in self._requests:
            raise SchedulingError(f"request {new.request_id} is added twice")
        if new.sampling.num_sequences > 1 or any(r.is_finished for r in new.resume):
            raise SchedulingError(f"request {new.request_id} has more than one live sequence")
        request = Request(new, self._eos_token_ids)
        max_num_tokens = self.limits.max_model_len
        if new.sampling.max_tokens is not None:
            asked = len(new.prompt_token_ids) + new.sampling.max_tokens
            max_num_tokens = min(asked, max_num_tokens)
        for index in range(new.sampling.num_sequences):
            resumed = new.resume[index].output_token_ids if new.resume else ()
            token_ids = [*new.prompt_token_ids, *resumed]
            sequence = Sequence(self._next_seq_id, request, index, token_ids, max_num_tokens)
            request.sequences.append(sequence)
            self._next_seq_id += 1
        self._requests[new.request_id] = request
        self._waiting.append(request)
        self._num_waiting += len(request.sequences)

    def abort(self, request_id: str) -> bool:
        """Forget a request; its blocks are free when this returns. ``False`` if it is not known."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if any(s.status is SequenceStatus.RUNNING for s in request.sequences):
            self._running = [s for s in self._running if s.request is not request]
        else:
            self._waiting.remove(request)
            self._num_waiting -= len(request.unfinished)
        for sequence in request.unfinished:
            self._drop_blocks(sequence)
            sequence.status = SequenceStatus.FINISHED
        return True

    # --- schedule --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Spend the token budget and return the step to execute."""
        budget = self.limits.max_num_batched_tokens
        num_preemptions = self.counters.num_preemptions
        rows, budget = self._schedule_running(budget)
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
            removed_seq_ids=tuple(removed),
            new_rows=tuple(new_rows),
            rows=tuple(rows),
        )
        self._next_step_id += 1
        return plan

    def _schedule_running(self, budget: int) -> tuple[list[ScheduledRow], int]:
        rows: list[ScheduledRow] = []
        running, memory = self._running, self.memory
        position = 0
        while position < len(running) and budget:
            sequence = running[position]
            blocks = sequence.blocks
            start = sequence.num_computed_tokens
            count = min(len(sequence.token_ids) - start, budget)
            if blocks is None:
                raise SchedulingError(f"running sequence {sequence.seq_id} has no blocks")
            if start + count > blocks.num_slots and not memory.grow(blocks, start + count):
                self._preempt(running[-1].request, rows)
                if position >= len(running):
                    break
                continue
            rows.append(self._row(sequence, start, count))
            budget -= count
            position += 1
        return rows, budget

    def _row(self, sequence: Sequence, start: int, count: int) -> ScheduledRow:
        blocks = sequence.blocks
        if blocks is None:
            raise SchedulingError(f"sequence {sequence.seq_id} is scheduled without blocks")
        first_changed = blocks.first_changed_block
        tables = blocks.tables
        blocks.first_changed_block = len(tables[0])
        num_samples = 1 if start + count == len(sequence.token_ids) else 0
        return ScheduledRow(sequence.seq_id, start, count, num_samples, tables, first_changed)

    def _admit(self, budget: int) -> Iterator[tuple[ScheduledRow, NewRow]]:
        while self._waiting and budget > 0:
            request = self._waiting[0]
            sequences = request.unfinished
            if len(self._running) + len(sequences) > self.limits.max_num_seqs:
                return
            if not self._fits(sequences):
                return
            self._waiting.popleft()
            self._num_waiting -= len(sequences)
            if request.scheduled_time is None:
                request.scheduled_time = self._clock()
            for sequence in sequences:
                count = min(len(sequence.token_ids), budget)
                budget -= count
                self._start(sequence)
                if count:
                    yield self._first_row(sequence, count)

    def _fits(self, sequences: list[Sequence]) -> bool:
        """Whether all blocks of ``sequences`` fit above the watermark (see the module's rule)."""
        needed = sum(self.memory.num_blocks_for(len(s.token_ids)) for s in sequences)
        free = self.memory.pool.num_free_blocks
        if not self._running:
            return needed <= free
        owed = sum(
            self.memory.num_blocks_for(len(s.token_ids) - s.blocks.num_slots)
            for s in self._running
            if s.blocks is not None and s.blocks.num_slots < len(s.token_ids)
        )
        return needed + owed + self._watermark_blocks <= free

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

    def _preempt(self, request: Request, rows: list[ScheduledRow]) -> None:
        """Take all blocks of ``request``, and its rows out of the plan; it waits again, first in line."""
        if len(self._running) == len(request.unfinished):
            raise SchedulingError(f"request {request.request_id} alone does not fit the pool")
        ids = {sequence.seq_id for sequence in request.sequences}
        while rows and rows[-1].seq_id in ids:
            rows.pop()
        while self._running and self._running[-1].request is request:
            sequence = self._running.pop()
            self._drop_blocks(sequence)
            sequence.num_computed_tokens = 0
            sequence.status = SequenceStatus.WAITING
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._waiting.appendleft(request)
        self._num_waiting += len(request.unfinished)

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
        has_finished = False
        for row in result.rows:
            sequence = self._by_seq_id.get(row.seq_id)
            if sequence is None:
                continue
            update = self._take(sequence, row)
            updates.append(update)
            if update.finish_reason is not None:
                has_finished = True
                self._finish(sequence)
        if has_finished:
            self._running = [s for s in self._running if s.status is SequenceStatus.RUNNING]
        num_generated = sum(len(update.token_ids) for update in updates)
        self.counters.num_generation_tokens += num_generated
        return updates, num_prefill_tokens + num_generated

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
        counters.kv_slot_steps_allocated += self.memory.num_allocated_slots
        counters.kv_slot_steps_used += self.memory.num_used_slots

    def _take(self, sequence: Sequence, row: RowResult) -> SequenceUpdate:
        request = sequence.request
        if row.error is not None:
            self.counters.num_nonfinite_rows += 1
            return SequenceUpdate(
                request.request_id,
                sequence.index,
                (),
                FinishReason.ERROR,
                scheduled_time=request.scheduled_time,
                num_preemptions=request.num_preemptions,
                error=row.error,
            )
        token_id = row.token_ids[0]
        is_first = len(sequence.token_ids) == sequence.num_prompt_tokens
        sequence.token_ids.append(token_id)
        reason = sequence.finish_reason()
        is_own_stop = (
            reason is FinishReason.STOP and token_id in request.new.sampling.stop_token_ids
        )
        return SequenceUpdate(
            request.request_id,
            sequence.index,
            (token_id,),
            reason,
            token_id if is_own_stop else None,
            request.scheduled_time if is_first else None,
            request.num_preemptions,
            tuple(row.logprobs) if row.logprobs is not None else None,
        )

    def _finish(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FINISHED
        self._drop_blocks(sequence)
        request = sequence.request
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
        live = {request.request_id for request in self._waiting}
        live |= {sequence.request.request_id for sequence in self._running}
        if live != set(self._requests):
            raise SchedulingError("a request is neither running nor waiting")
        if not self._requests and self.memory.pool.num_used_blocks:
            raise SchedulingError(f"{self.memory.pool.num_used_blocks} blocks are used by nobody")
