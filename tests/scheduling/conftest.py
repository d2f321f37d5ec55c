"""A fake executor that keeps memory honest: what a row reads through its table is what it wrote."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.engine.api import SamplingParams
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.request import NewRequest, SequenceUpdate
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.step import RowResult, ScheduledRow, StepPlan, StepResult

VOCAB = 97
EOS = 96


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """The fake model: depends on the seed and every token so far. Never an end id."""
    value = len(token_ids) + 7919 * seed
    for token_id in token_ids:
        value = (value * 31 + token_id) % 1_000_003
    return value % (VOCAB - 1)


class FakeExecutor:
    """Computes ``next_token`` and verifies that block tables give every row its own past."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.rows: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.bad_seq_ids: set[int] = set()
        self.num_copies = 0

    def run(self, plan: StepPlan) -> StepResult:
        for fork in plan.forks:
            assert fork.child_seq_id not in self.rows
            self.rows[fork.child_seq_id] = self.rows[fork.parent_seq_id][: fork.num_tokens]
            self.tables[fork.child_seq_id] = list(self.tables[fork.parent_seq_id])
            self.seeds[fork.child_seq_id] = fork.seed
        for seq_id in plan.removed_seq_ids:
            del self.rows[seq_id]
            del self.tables[seq_id]
        for new in plan.new_rows:
            assert new.seq_id not in self.rows
            self.rows[new.seq_id] = [*new.prompt_token_ids, *new.output_token_ids]
            self.tables[new.seq_id] = []
            self.seeds[new.seq_id] = new.seed
        self._copy(plan)
        for row in plan.rows:
            self._write(row)
        return StepResult(
            plan.step_id, tuple(self._sample(row) for row in plan.rows if row.num_samples)
        )

    def _copy(self, plan: StepPlan) -> None:
        sources = {copy.src_block_id for copy in plan.block_copies}
        targets = [copy.dst_block_id for copy in plan.block_copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets)
        self.num_copies += len(targets)
        for _, src, dst in plan.block_copies:
            for offset in range(self.block_size):
                if src * self.block_size + offset in self.slots:
                    value = self.slots[src * self.block_size + offset]
                    self.slots[dst * self.block_size + offset] = value

    def _write(self, row: ScheduledRow) -> None:
        (table,) = row.block_tables
        self.rows[row.seq_id] += row.appended_token_ids
        mirror = self.tables[row.seq_id]
        mirror[row.first_changed_block :] = table[row.first_changed_block :]
        assert mirror == list(table)
        tokens = self.rows[row.seq_id]
        for position in range(row.start, row.start + row.num_tokens):
            self.slots[self._slot(mirror, position)] = tokens[position]
        for position in range(row.start):
            assert self.slots[self._slot(mirror, position)] == tokens[position]

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _sample(self, row: ScheduledRow) -> RowResult:
        tokens = self.rows[row.seq_id]
        assert row.start + row.num_tokens == len(tokens)
        if row.seq_id in self.bad_seq_ids:
            return RowResult(row.seq_id, (), error="logits are not finite")
        seed = self.seeds[row.seq_id]
        samples = [next_token(tokens, seed + i) for i in range(row.num_samples)]
        tokens.append(samples[0])
        return RowResult(row.seq_id, samples)


class Bench:
    """A scheduler over the fake executor; checks every invariant after each step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        budget: int = 16,
        max_num_seqs: int = 8,
        max_model_len: int = 200,
        watermark: float = 0.0,
        eos_token_ids: tuple[int, ...] = (EOS,),
    ) -> None:
        self.memory = KVCacheManager(num_blocks, block_size)
        limits = SchedulerLimits(budget, max_num_seqs, max_model_len, watermark)
        self.scheduler = Scheduler(limits, self.memory, eos_token_ids, clock=lambda: 1.0)
        self.executor = FakeExecutor(block_size)
        self.outputs: dict[str, list[int]] = {}  # of the first sequence
        self.children: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[str, SequenceUpdate] = {}  # of the last sequence to end
        self.plans: list[StepPlan] = []

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **params: object
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        self.scheduler.add(NewRequest(request_id, prompt, sampling, seed=0, arrival_time=0.0))

    def step(self) -> tuple[list[SequenceUpdate], int]:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        assert plan.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        updates, num_tokens = self.scheduler.commit(plan, self.executor.run(plan))
        self.scheduler.check()
        for update in updates:
            key = (update.request_id, update.child_index)
            self.children.setdefault(key, []).extend(update.token_ids)
            if update.child_index == 0:
                self.outputs[update.request_id] = self.children[key]
            if update.finish_reason is not None:
                self.finished[update.request_id] = update
        return updates, num_tokens

    def drain(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the work never ends")


@pytest.fixture(scope="session")
def bench() -> type[Bench]:
    return Bench


def expected_output(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def expected() -> object:
    return expected_output
