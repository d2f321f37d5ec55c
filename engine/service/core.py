"""The engine core: add, abort, step. The same object behind the engine process and the offline ``LLM``.

Owns the order of things in a step. Must not know sockets, text or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from ..scheduling.request import NewRequest, SequenceUpdate
from ..scheduling.scheduler import Scheduler
from ..stats import EngineStats
from ..step import Executor


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
        result = self._executor.submit(plan).result()
        executed = time.perf_counter()
        updates, num_step_tokens = self._scheduler.commit(plan, result)
        if self._check_invariants:
            self._scheduler.check()
        end = time.perf_counter()
        self._busy_s += end - begin
        self._schedule_s += (scheduled - begin) + (end - executed)
        return StepOutput(updates, num_step_tokens, self.stats())

    def stats(self) -> EngineStats:
        """A snapshot. Taken between steps."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        memory = scheduler.memory
        return EngineStats(
            epoch=self._epoch,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=memory.pool.num_blocks,
            num_used_blocks=memory.pool.num_used_blocks,
            block_size=memory.block_size,
            num_used_slots=memory.num_used_slots,
            num_steps=counters.num_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            num_preemptions=counters.num_preemptions,
            num_block_copies=counters.num_block_copies,
            num_nonfinite_rows=counters.num_nonfinite_rows,
            kv_slot_steps_allocated=counters.kv_slot_steps_allocated,
            kv_slot_steps_used=counters.kv_slot_steps_used,
            busy_s=self._busy_s,
            schedule_s=self._schedule_s,
        )
