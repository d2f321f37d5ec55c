"""A stream of requests through the real scheduler and memory, with an executor that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from octavo.engine.api import SamplingParams
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.request import NewRequest, SequenceUpdate
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.step import RowResult, ScheduledRow, StepPlan, StepResult

from .beam_record import RecordedSearch
from .lengths import MAX_MODEL_LEN, Lengths

CHECK_EVERY = 1000
TOKEN = 7


@dataclass
class _Row:
    """What the executor knows of a sequence."""

    request: int
    num_prompt_tokens: int
    beam: int


class FakeExecutor:
    """Answers each sampled row with a token, and each beam with what its recorded search did.

    Args:
        searches: recorded searches of the stream's width; request ``i`` replays one drawn with seed ``i``.
    """

    def __init__(self, searches: Sequence[RecordedSearch] = ()) -> None:
        self._searches = searches
        self._rows: dict[int, _Row] = {}

    def run(self, plan: StepPlan) -> StepResult:
        if not self._searches:
            sampled = (row for row in plan.rows if row.num_samples)
            results = (RowResult(row.seq_id, (TOKEN,) * row.num_samples) for row in sampled)
            return StepResult(plan.step_id, tuple(results))
        for fork in plan.forks:
            parent = self._rows[fork.parent_seq_id]
            self._rows[fork.child_seq_id] = _Row(
                parent.request, parent.num_prompt_tokens, parent.beam
            )
        for seq_id in plan.removed_seq_ids:
            del self._rows[seq_id]
        for new in plan.new_rows:  # a beam's last token is its place among the beams
            beam = new.output_token_ids[-1] if new.output_token_ids else 0
            self._rows[new.seq_id] = _Row(new.seed, len(new.prompt_token_ids), beam)
        beams = [self._continue(row) for row in plan.rows]
        return StepResult(plan.step_id, tuple(result for result in beams if result is not None))

    def _continue(self, row: ScheduledRow) -> RowResult | None:
        known = self._rows[row.seq_id]
        if row.appended_token_ids:
            known.beam = row.appended_token_ids[-1]
        if not row.num_candidates:
            return None
        search = self.search_of(known.request)
        step = row.start + row.num_tokens - known.num_prompt_tokens
        return RowResult(row.seq_id, (), candidates=search.candidates(known.beam, step))

    def search_of(self, request: int) -> RecordedSearch:
        return self._searches[Random(request).randrange(len(self._searches))]


@dataclass
class Sums:
    """Over steps: slots as the scheduler counts them, references between ``schedule()`` and ``commit()``.

    Before the copies of a step are scheduled, a fork shares its half-full block too, which does not last.
    """

    num_steps: int = 0
    num_running: int = 0
    used_slots: int = 0
    allocated_slots: int = 0
    saved_blocks: int = 0
    references: int = 0

    def add(self, other: Sums) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Replay:
    """What came of a stream."""

    loaded: Sums = field(default_factory=Sums)  # while requests waited, after the warm-up
    whole: Sums = field(default_factory=Sums)
    num_slots: int = 0
    num_finished: int = 0  # sequences, or hypotheses
    num_preemptions: int = 0
    num_copies: int = 0
    num_computed_tokens: int = 0  # those computed again after a preemption too

    @property
    def num_running(self) -> float:
        return self.loaded.num_running / max(1, self.loaded.num_steps)

    @property
    def token_share(self) -> float:
        """Slots that hold a token, of those allocated."""
        return self.loaded.used_slots / max(1, self.loaded.allocated_slots)

    @property
    def pool_share(self) -> float:
        """Slots that hold a token, of the whole pool."""
        return self.loaded.used_slots / max(1, self.loaded.num_steps * self.num_slots)

    @property
    def held_tokens(self) -> float:
        """Tokens held per running sequence."""
        return self.loaded.used_slots / max(1, self.loaded.num_running)

    @property
    def saved_share(self) -> float:
        """Blocks saved by sharing, of those that there would be without it."""
        return self.whole.saved_blocks / max(1, self.whole.references)


class Replayer:
    """One stream through one scheduler.

    Args:
        stream: lengths of the requests; all wait from the start.
        num_slots: size of the pool in tokens.
        block_size: tokens in a block.
        n: sequences of each request.
        searches: recorded beam searches of width ``n``; without them the sequences are samples.
        shared_prefix: tokens that all prompts begin with, before their own.
        enable_prefix_caching: as the engine's option.
        max_num_seqs: seats; by default more than can fit the pool.
        watermark: share of the pool that stays free when a request is admitted.
        warm_share: of the stream, finished before the pool's load is measured.
    """

    def __init__(
        self,
        stream: Sequence[Lengths],
        num_slots: int,
        *,
        block_size: int = 16,
        n: int = 1,
        searches: Sequence[RecordedSearch] = (),
        shared_prefix: int = 0,
        enable_prefix_caching: bool = False,
        max_num_seqs: int = 4096,
        watermark: float = 0.01,
        warm_share: float = 0.2,
    ) -> None:
        self.executor = FakeExecutor(searches)
        memory = KVCacheManager(
            num_slots // block_size, block_size, enable_prefix_caching=enable_prefix_caching
        )
        limits = SchedulerLimits(
            max(2048, max_num_seqs), max_num_seqs, MAX_MODEL_LEN, watermark, "recompute"
        )
        self.scheduler = Scheduler(limits, memory)
        self._num_sequences = len(stream) * n
        self._warm = warm_share * self._num_sequences
        self._result = Replay(num_slots=num_slots)
        random = Random(1)
        prefix = [random.randrange(50_000) for _ in range(shared_prefix)]
        for number, one in enumerate(stream):
            own = [TOKEN] * one.num_prompt_tokens
            if enable_prefix_caching:  # prompts that have nothing else in common
                own = [random.randrange(50_000) for _ in own]
            sampling = SamplingParams(
                n=n, use_beam_search=bool(searches), max_tokens=one.num_output_tokens
            )
            self.scheduler.add(NewRequest(str(number), prefix + own, sampling, number, 0.0))

    def run(self) -> Replay:
        scheduler, result = self.scheduler, self._result
        num_steps = 0
        while scheduler.has_work:
            sums, updates = self._step()
            result.num_finished += _num_ended(updates)
            result.whole.add(sums)
            if result.num_finished >= self._warm and scheduler.num_waiting:
                result.loaded.add(sums)
            num_steps += 1
            if num_steps % CHECK_EVERY == 0:
                scheduler.check()
        scheduler.check()
        counters = scheduler.counters
        result.num_preemptions = counters.num_preemptions
        result.num_copies = counters.num_block_copies
        result.num_computed_tokens = counters.num_scheduled_tokens
        return result

    def _step(self) -> tuple[Sums, list[SequenceUpdate]]:
        scheduler, memory, counters = (
            self.scheduler,
            self.scheduler.memory,
            self.scheduler.counters,
        )
        sums = Sums(
            used_slots=-counters.kv_slot_steps_used,
            allocated_slots=-counters.kv_slot_steps_allocated,
            num_steps=-counters.num_steps,
        )
        plan = scheduler.schedule()
        sums.num_running = scheduler.num_running
        sums.saved_blocks = memory.num_saved_blocks
        sums.references = memory.pool.num_references
        updates, _ = scheduler.commit(plan, self.executor.run(plan))
        sums.used_slots += counters.kv_slot_steps_used
        sums.allocated_slots += counters.kv_slot_steps_allocated
        sums.num_steps += counters.num_steps
        return sums, updates


def _num_ended(updates: Sequence[SequenceUpdate]) -> int:
    return sum(update.finish_reason is not None and not update.error for update in updates)


def replay(stream: Sequence[Lengths], num_slots: int, **options: object) -> Replay:
    """Serve ``stream`` to its end (see :class:`Replayer`).

    Raises:
        RuntimeError: a request did not finish, or left blocks behind.
    """
    replayer = Replayer(stream, num_slots, **options)  # type: ignore[arg-type]
    result = replayer.run()
    left = replayer.scheduler.memory.pool.num_used_blocks
    if result.num_finished != replayer._num_sequences or left:
        raise RuntimeError(f"{result.num_finished} sequences finished, {left} blocks are left")
    return result
