"""The engine core: add, abort, step. The same object behind the engine process and the offline ``LLM``.

Owns the order of things in a step. Must not know sockets, text or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..api import KVSnapshot
from ..scheduling.request import NewRequest, SequenceUpdate
from ..scheduling.scheduler import Scheduler
from ..stats import EngineStats
from ..step import Executor, StepPlan


class StepOutput(NamedTuple):
    """What one step gave all its sequences."""

    updates: list[SequenceUpdate]
    num_step_tokens: int  # prompt tokens computed plus tokens generated
    stats: EngineStats


class EngineCore:
    """Runs steps: schedule → execute → commit.

    Args:
        scheduler: decides what a step computes.
        executor: computes it.
        epoch: number of this engine life; stamped on every snapshot.
        check_invariants: verify memory and queues after each step and abort.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        epoch: int = 0,
        check_invariants: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._epoch = epoch
        self._check_invariants = check_invariants
        self._busy_s = 0.0
        self._schedule_s = 0.0
        self.before_execution: Callable[[StepPlan], None] | None = None
        self.after_execution: Callable[[], None] | None = None

    @property
    def running_request_ids(self) -> list[str]:
        """Requests that the step of the last schedule may have rows of."""
        return self._scheduler.running_request_ids

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: NewRequest) -> None:
        self._scheduler.add(request)

    def abort(self, request_ids: Sequence[str], sequences: Sequence[tuple[str, int]] = ()) -> None:
        """Forget requests, or single sequences ``(request_id, child_index)`` of them.

        Unknown ones have just finished and are passed over.
        """
        for request_id in request_ids:
            self._scheduler.abort(request_id)
        for request_id, child_index in sequences:
            self._scheduler.abort_sequence(request_id, child_index)
        if self._check_invariants:
            self._scheduler.check()

    def step(self) -> StepOutput:
        """Compute one step. Call only while ``has_work``."""
        begin = time.perf_counter()
        plan = self._scheduler.schedule()
        scheduled = time.perf_counter()
        if self.before_execution is not None:
            self.before_execution(plan)
        result = self._executor.submit(plan).result()
        if self.after_execution is not None:
            self.after_execution()
        executed = time.perf_counter()
        self._note_rates(plan, executed - scheduled, result.swap_s)
        updates, num_step_tokens = self._scheduler.commit(plan, result)
        updates += self._scheduler.begun(updates)
        if self._check_invariants:
            self._scheduler.check()
        end = time.perf_counter()
        self._busy_s += end - begin
        self._schedule_s += (scheduled - begin) + (end - executed)
        return StepOutput(updates, num_step_tokens, self.stats())

    def _note_rates(self, plan: StepPlan, execute_s: float, swap_s: float) -> None:
        rates = self._scheduler.rates
        if plan.num_tokens >= 2 * len(
            plan.rows
        ):  # most of it prompts, which decoding is slower than
            rates.note_step(plan.num_tokens, execute_s - swap_s)
        rates.note_swap(len(plan.block_swaps) * self._scheduler.memory.block_bytes, swap_s)

    def kv_snapshot(self) -> KVSnapshot:
        """KV memory and all sequences. Taken between steps."""
        return self._scheduler.kv_snapshot()

    def reset_prefix_cache(self) -> None:
        """Let nobody find anything that was computed so far. Call between steps."""
        self._scheduler.memory.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """A snapshot. Taken between steps."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        memory, cache = scheduler.memory, scheduler.memory.cache
        return EngineStats(
            epoch=self._epoch,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=memory.pool.num_blocks,
            num_used_blocks=memory.pool.num_used_blocks,
            block_size=memory.block_size,
            num_used_slots=memory.num_used_slots,
            num_cached_blocks=len(cache.index),
            num_shared_blocks=memory.pool.num_shared_blocks,
            num_saved_blocks=memory.num_saved_blocks,
            num_host_blocks=cache.host.num_blocks,
            num_used_host_blocks=cache.host.num_used_blocks,
            num_steps=counters.num_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            num_preemptions=counters.num_preemptions,
            num_preemptions_by_swap=counters.num_preemptions_by_swap,
            num_block_copies=counters.num_block_copies,
            num_nonfinite_rows=counters.num_nonfinite_rows,
            kv_slot_steps_allocated=counters.kv_slot_steps_allocated,
            kv_slot_steps_used=counters.kv_slot_steps_used,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            prefix_cache_host_hits=counters.prefix_cache_host_hits,
            prefix_cache_inside_block_hits=counters.prefix_cache_inside_block_hits,
            num_evictions=cache.num_evictions,
            num_blocks_swapped_out=counters.num_blocks_swapped_out,
            num_blocks_swapped_in=counters.num_blocks_swapped_in,
            swapped_out_bytes=counters.num_blocks_swapped_out * memory.block_bytes,
            swapped_in_bytes=counters.num_blocks_swapped_in * memory.block_bytes,
            block_lifetimes=memory.times.lifetimes.counts(),
            block_idle_times=memory.times.idle_times.counts(),
            busy_s=self._busy_s,
            schedule_s=self._schedule_s,
        )
