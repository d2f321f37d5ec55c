"""The scheduler: which tokens of which sequences are computed in the next step.

**The token-budget rule.** A step has no phases. Each sequence is owed ``len(token_ids) -
num_computed_tokens`` tokens: one while it decodes, more while its prompt (or, after a preemption, its
prompt and output) is not computed yet. A step spends at most ``max_num_batched_tokens`` tokens, on
running sequences first, in order of admission, then on waiting requests, first come first served; what
does not fit is computed in chunks over later steps. Beside sequences that decode, prompts get at most
``max_mixed_prefill_tokens`` of it, so that running streams are not held up. Chunked prefill, mixed batches, prefix hits and
recompute after preemption are consequences, not cases.

**Admission.** A waiting request is admitted when a seat is free for each of its sequences and all blocks
that its tokens need fit above the watermark, counting what running prompts are still owed. The head of
the queue is never overtaken and the request admitted first is never preempted, so a request of any size
that fits the pool is served once those before it end. (While nothing runs there is no watermark.)

**Forks.** The sequences of one request share its prompt. The first computes it, the others have seats and
wait; its last position is sampled once for each, and then they fork: their tables point at the same
blocks. Whoever writes to a shared block first gets a copy (copy-on-write). After a preemption it is the
same again, but for the tokens that each has already. The beams of a beam search fork and end at every step.

**Embeddings.** A prompt whose hidden states are pooled to a vector is scheduled like any other, draws nothing
and ends with its last token. What a preemption interrupts begins anew.

**Preemption.** When a running sequence needs a block and none is free, the request admitted last gives
back all its blocks and waits again at the head of the queue; its tokens are kept. What only it held is
copied to the host tier and back, or computed anew, whichever is expected to be faster.

**Priorities.** With the policy ``priority`` both queues are in order of rank: the priority, a lower number
first, then arrival. Some time of waiting is worth one step of priority, so that new requests cannot overtake
an old one for ever; with ``priority_aging_s`` 0 they can. A rank never changes, and what is said above of
the order of admission holds of it: the budget is spent in its order, the last is preempted first, the first
never. If seats or blocks for the head of the queue are held by running requests of lower rank and priority,
these are preempted for it. Sequences that decode get their token in every step, whatever their rank.

**Fair shares.** With the policy ``fair`` the rank is a tag by which tenants take turns (``fair_share``). It orders as
a priority does, but nothing running makes way for it.

Must not know tensors, kernels, text or processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..api import KVSnapshot
from ..errors import NOTHING_LEFT
from ..memory.kv_cache_manager import KVCacheManager
from ..step import ExecutorRates, RowResult, StepPlan, StepResult
from .admitter import Admitter
from .beams import take_candidates
from .fair_share import FairShare
from .limits import SchedulerCounters, SchedulerLimits, SchedulingError
from .preemption import Preemption, Rates
from .request import NewRequest, Request, Sequence, SequenceStatus, SequenceUpdate
from .request_table import RequestTable
from .snapshot import kv_snapshot
from .step_draft import StepDraft
from .updates import appended, begun, failed, pooled, scored, unsampled


class Scheduler:
    """Queues, budget and progress of all requests. ``schedule()`` and ``commit()`` alternate."""

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: KVCacheManager,
        eos_token_ids: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        rates: ExecutorRates | None = None,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.counters = SchedulerCounters()
        self.rates = Rates(rates)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._table = table = RequestTable(
            memory,
            is_by_priority=limits.policy != "fcfs",
            aging_s=limits.priority_aging_s,
            fair_share=FairShare() if limits.policy == "fair" else None,
        )
        self._admitter = Admitter(table, memory, limits, self.counters, clock)
        self._preemption = Preemption(table, memory, limits, self.counters, self.rates)
        self._next_step_id = 0

    # --- requests --------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._table.running)

    @property
    def num_waiting(self) -> int:
        return self._table.num_waiting

    @property
    def running_request_ids(self) -> list[str]:
        """In order of their first running sequence."""
        return list(dict.fromkeys(s.request.request_id for s in self._table.running))

    @property
    def has_work(self) -> bool:
        """Whether ``schedule()`` has anything to say, be it only what the executor may forget."""
        return self._table.has_work

    def add(self, new: NewRequest) -> None:
        """Queue a request behind those that came before.

        Raises:
            SchedulingError: its id is in use, all its sequences have finished, or only some of them that
                go on have a token (they draw their first one in the same step).
        """
        if new.request_id in self._table.requests:
            raise SchedulingError(f"request {new.request_id} is added twice")
        if all(r.is_finished for r in new.resume) and new.resume:
            raise SchedulingError(f"request {new.request_id} has nothing left to compute")
        if len({bool(r.output_token_ids) for r in new.resume if not r.is_finished}) > 1:
            raise SchedulingError(f"request {new.request_id}: all have a first token, or none has")
        self._table.add(Request(new, self._eos_token_ids, self.limits.max_model_len))

    def abort(self, request_id: str) -> bool:
        """Forget a request; its blocks are free when this returns. ``False`` if it is not known."""
        request = self._table.requests.get(request_id)
        if request is None:
            return False
        self._table.remove(request)
        return True

    def abort_sequence(self, request_id: str, child_index: int) -> None:
        """End one sequence of a request; the others go on. Unknown and ended ones are passed over.

        The beams of a search depend on each other and end together only.
        """
        table = self._table
        request = table.requests.get(request_id)
        if request is None or request.beam_search is not None:
            return
        sequence = request.sequences[child_index]
        if sequence.status is SequenceStatus.FINISHED:
            return
        if len(request.unfinished) == 1:
            table.remove(request)
            return
        if request.pending:  # back to the queue, where no sequence depends on another
            table.suspend(request)
        if request.is_running:
            table.running.remove(sequence)
        else:
            table.num_waiting -= 1
        table.end(sequence)

    # --- schedule --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Spend the token budget and return the step to execute."""
        table, memory = self._table, self.memory
        memory.times.now = self._clock()
        limits = self.limits
        draft = StepDraft(limits.max_num_batched_tokens, memory, limits.max_mixed_prefill_tokens)
        if table.is_by_priority:
            self._make_way(draft)
        num_preemptions = self.counters.num_preemptions
        self._schedule_running(draft)
        if table.waiting and self.counters.num_preemptions == num_preemptions:
            self._admitter.admit(draft)
        if not draft.rows and (table.running or table.waiting):
            raise SchedulingError("there is work, and nothing of it can be scheduled")
        plan = StepPlan(
            step_id=self._next_step_id,
            forks=table.take_forks(),
            removed_seq_ids=table.take_removed(),
            new_rows=tuple(draft.new_rows),
            block_swaps=memory.take_swaps(),
            block_copies=draft.block_copies,
            rows=tuple(draft.rows),
        )
        self._next_step_id += 1
        self.counters.num_block_copies += draft.num_copies_on_write
        return plan

    def _schedule_running(self, draft: StepDraft) -> None:
        running = self._table.running
        position = 0
        while position < len(running) and draft.budget:
            sequence = running[position]
            request, blocks = sequence.request, sequence.blocks
            start = sequence.num_computed_tokens
            count = draft.most(len(sequence.token_ids) - start)
            if request.pending:
                count = min(count, sequence.num_prompt_tokens - start)
            if not count:  # a beam that waits for the others' candidates
                position += 1
                continue
            has_room = blocks is not None and start + count <= blocks.num_slots
            is_alone = len(request.sequences) == 1
            if not (has_room and is_alone) and not self._make_room(sequence, start, count, draft):
                self._preempt_last(draft)
                continue
            draft.put(sequence, start, count)
            position += 1

    def _make_way(self, draft: StepDraft) -> None:
        """For the head of the queue, by requests of lower priority; and for all that decode, by prompts."""
        table = self._table
        for request in self._admitter.victims() if table.waiting else ():
            self._preemption.preempt(request, draft)
        owed = (len(s.token_ids) - s.num_computed_tokens for s in table.running)
        draft.keep_for_decoding(sum(1 for num_tokens in owed if num_tokens == 1))

    def _preempt_last(self, draft: StepDraft) -> None:
        first, last = self._table.running[0].request, self._table.running[-1].request
        if first is last:
            raise SchedulingError(f"request {last.request_id} alone does not fit the pool")
        self._preemption.preempt(last, draft)

    def _make_room(self, sequence: Sequence, start: int, count: int, draft: StepDraft) -> bool:
        """Blocks for ``count`` tokens from ``start`` on that nobody else sees. ``False``: none free."""
        blocks, memory = sequence.live_blocks, self.memory
        if len(sequence.request.sequences) > 1 and not sequence.num_unwritten_tokens:
            made = memory.make_writable(blocks, start)
            if made is None:
                return False
            if made:
                draft.copies.setdefault(sequence.seq_id, []).extend(made)
        return start + count <= blocks.num_slots or memory.grow(blocks, start + count)

    # --- commit ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[list[SequenceUpdate], int]:
        """Take in what a step computed.

        Returns:
            One update per sequence that got a token or ended, and the step's token count: prompt tokens
            computed plus tokens generated.
        """
        if result.step_id != plan.step_id:
            raise SchedulingError(f"step {plan.step_id} got the result of step {result.step_id}")
        self.memory.commit()
        num_prefill_tokens, complete = self._advance(plan)
        self._count(plan)
        updates: list[SequenceUpdate] = []
        for row in result.rows:
            sequence = self._table.by_seq_id.get(row.seq_id)
            if sequence is not None:
                updates += self._take(sequence, row)
        if complete:
            updates += _unsampled(complete, updates)
        if self._table.groups:
            self._fork_pending(plan)
        finished = [update for update in updates if update.finish_reason is not None]
        for update in finished:
            self._finish(update)
        if finished:
            self._table.drop_finished()
        num_generated = sum(len(update.token_ids) for update in updates)
        self.counters.num_generation_tokens += num_generated
        return updates, num_prefill_tokens + num_generated

    def begun(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """One update for each request that began in this step and that ``updates`` do not tell of."""
        requests = self._admitter.take_begun()
        if not requests:
            return []
        told = {update.request_id for update in updates if update.scheduled_time is not None}
        return [begun(request) for request in requests if request.request_id not in told]

    def _fork_pending(self, plan: StepPlan) -> None:
        """Let the others of a request go their own way, where its prompt has been computed."""
        for row in plan.rows:
            leader = self._table.by_seq_id.get(row.seq_id)
            if leader is None or not leader.request.pending:
                continue
            if leader.num_computed_tokens >= leader.num_prompt_tokens:
                self._fork_all(leader)

    def _fork_all(self, leader: Sequence) -> None:
        request, num_tokens = leader.request, leader.num_prompt_tokens
        children = [s for s in request.pending if s.status is not SequenceStatus.FINISHED]
        request.pending = []
        for child in children:
            self._table.fork(leader, child, num_tokens)
        for sequence in (leader, *children):
            if len(sequence.token_ids) > num_tokens + 1:  # after a preemption
                self.memory.extend(sequence.live_blocks, sequence.token_ids)
                sequence.num_computed_tokens = sequence.live_blocks.num_tokens
        self._table.replace_running([leader], [leader, *children])

    def _advance(self, plan: StepPlan) -> tuple[int, list[Sequence]]:
        """Note the plan's rows as computed.

        Returns:
            How many of their tokens were prefill, and the sequences that are complete with their prompt.
        """
        num_prefill_tokens = 0
        complete: list[Sequence] = []
        for row in plan.rows:
            sequence = self._table.by_seq_id.get(row.seq_id)
            if sequence is None or sequence.blocks is None:
                continue
            end = row.start + row.num_tokens
            sequence.num_computed_tokens = end
            self.memory.mark_computed(sequence.blocks, end)
            num_prompt_tokens = sequence.num_prompt_tokens
            if row.start < num_prompt_tokens:
                if end >= num_prompt_tokens:
                    self.memory.publish_tail(sequence.blocks, sequence.token_ids)
                    if sequence.max_num_tokens <= num_prompt_tokens:
                        complete.append(sequence)
                reached = min(end, num_prompt_tokens)
                num_prefill_tokens += reached - row.start
                fresh = reached - sequence.request.num_counted_prompt_tokens
                if fresh > 0:
                    self.counters.num_prompt_tokens += fresh
                    sequence.request.num_counted_prompt_tokens = reached
        return num_prefill_tokens, complete

    def _count(self, plan: StepPlan) -> None:
        counters = self.counters
        num_out = sum(swap.to_host for swap in plan.block_swaps)
        counters.num_blocks_swapped_out += num_out
        counters.num_blocks_swapped_in += len(plan.block_swaps) - num_out
        if not plan.rows:
            return
        counters.num_steps += 1
        counters.num_scheduled_tokens += plan.num_tokens
        counters.kv_slot_steps_allocated += self.memory.num_allocated_slots
        counters.kv_slot_steps_used += self.memory.num_used_slots

    def _take(self, sequence: Sequence, row: RowResult) -> list[SequenceUpdate]:
        """Give each token of ``row`` to its sequence: the row's own, then those that fork from it."""
        request = sequence.request
        if row.error is not None:
            self.counters.num_nonfinite_rows += row.error != NOTHING_LEFT
            self.memory.forget(sequence.live_blocks)
        if request.beam_search is not None:
            return take_candidates(self._table, sequence, row)
        drawn = [sequence]
        if row.error is not None or len(row.token_ids) > 1:
            drawn += request.pending
        if row.error is not None:
            return [failed(request, one.index, row.error) for one in drawn]
        if row.embedding is not None:
            return [pooled(sequence, row.embedding)]
        updates = []
        if row.prompt_logprobs:
            updates.append(scored(sequence, row.prompt_logprobs))
        if not row.token_ids:
            return updates
        for one in drawn:
            sample = one.index - sequence.index
            logprobs = None if row.logprobs is None else row.logprobs[sample]
            updates.append(appended(one, row.token_ids[sample], logprobs))
        return updates

    def _finish(self, update: SequenceUpdate) -> None:
        request = self._table.requests.get(update.request_id)
        if request is None:  # a beam search, which ends as a whole
            return
        sequence = request.sequences[update.child_index]
        self._table.end(sequence, is_kept=update.error is None)
        if not request.unfinished:
            self._table.forget(request)

    # --- to look at ------------------------------------------------------------------------------

    def kv_snapshot(self) -> KVSnapshot:
        """KV memory and all sequences, between two steps."""
        return kv_snapshot(self.memory, self._table.requests.values())

    def check(self) -> None:
        """Verify memory and the scheduler's own tables.

        Raises:
            MemoryInvariantError, SchedulingError: they contradict each other.
        """
        self.memory.check()
        self._table.check()


def _unsampled(complete: list[Sequence], updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
    """The ends of sequences without output, and of those that would fork from them.

    Raises:
        SchedulingError: an embedding is wanted, and the step gave none.
    """
    ended_ids = {update.request_id for update in updates if update.finish_reason is not None}
    silent = [leader.request for leader in complete if leader.request.request_id not in ended_ids]
    for request in silent:
        if request.new.pooling is not None:
            raise SchedulingError(
                f"request {request.request_id} was computed without its embedding"
            )
    return [unsampled(request, one.index) for request in silent for one in request.unfinished]
