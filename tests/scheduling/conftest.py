"""A fake executor that keeps memory honest: what a row reads through its table is what it wrote."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.engine.api import SamplingParams
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.request import NewRequest, SequenceUpdate
from octavo.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from octavo.engine.step import RowResult, ScheduledRow, StepPlan, StepResult

VOCAB = 97
EOS = 96


def next_token(token_ids: Sequence[int]) -> int:
    """The fake model: depends on every token so far. Never an end id."""
    value = len(token_ids)
    for token_id in token_ids:
        value = (value * 31 + token_id) % 1_000_003
    return value % (VOCAB - 1)


class FakeExecutor:
    """Computes ``next_token`` and verifies that block tables give every row its own past."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.rows: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.bad_seq_ids: set[int] = set()

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.removed_seq_ids:
            del self.rows[seq_id]
            del self.tables[seq_id]
        for new in plan.new_rows:
            assert new.seq_id not in self.rows
            self.rows[new.seq_id] = [*new.prompt_token_ids, *new.output_token_ids]
            self.tables[new.seq_id] = []
        for row in plan.rows:
            self._write(row)
        return StepResult(
            plan.step_id, tuple(self._sample(row) for row in plan.rows if row.num_samples)
        )

    def _write(self, row: ScheduledRow) -> None:
        (table,) = row.block_tables
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
        tokens.append(next_token(tokens))
        return RowResult(row.seq_id, (tokens[-1],))


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
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, SequenceUpdate] = {}
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
            self.outputs.setdefault(update.request_id, []).extend(update.token_ids)
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


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def expected() -> object:
    return expected_output
