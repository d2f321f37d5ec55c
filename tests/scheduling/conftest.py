"""A fake executor that keeps memory honest: what a row reads through its table is what it wrote.

A slot of the fake KV memory holds a value that stands for one token and all tokens before it, so that a
wrong slot, a missed copy or a stale hit shows as a wrong value.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.engine.api import PoolingParams, ResumedSequence, SamplingParams
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.request import NewRequest, SequenceUpdate
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.step import (
    ExecutorRates,
    RowResult,
    SampleLogprobs,
    ScheduledRow,
    StepPlan,
    StepResult,
)

SLOW_COPIES = ExecutorRates(1.0, 1.0)
VOCAB = 97
EOS = 96


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """The fake model: depends on the seed and every token so far. Never an end id."""
    value = len(token_ids) + 7919 * seed
    for token_id in token_ids:
        value = (value * 31 + token_id) % 1_000_003
    return value % (VOCAB - 1)


def candidates(token_ids: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The fake model's most likely next tokens, the end id among them, with made-up logprobs."""
    base = next_token(token_ids)
    scored = [(t, -1.0 - (base * 7 + t * 53 + t * t * 11) % 389 / 97) for t in range(VOCAB)]
    return sorted(scored, key=lambda pair: -pair[1])[:count]


def state_values(token_ids: Sequence[int]) -> list[int]:
    """The fake model's hidden states: each value stands for a token and all before it."""
    values: list[int] = []
    for token_id in token_ids:
        values.append(hash((values[-1] if values else 0, token_id)))
    return values


def fake_embedding(prompt: Sequence[int], pooling_type: str) -> bytes:
    """The last of the hidden states, or something that depends on all of them."""
    values = state_values(prompt)
    return str(values[-1] if pooling_type == "last" else sum(values)).encode()


class FakePool:
    """What the fake executor keeps of a prompt that is pooled."""

    def __init__(self, pooling: PoolingParams) -> None:
        self.is_mean = pooling.pooling_type == "mean"
        self.num_added = 0
        self.total = 0


class FakeExecutor:
    """Computes ``next_token`` and verifies that block tables give every row its own past."""

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.slots: dict[int, int] = {}
        self.host: dict[int, dict[int, int]] = {}
        self.rows: dict[int, list[int]] = {}
        self.values: dict[int, list[int]] = {}  # of the rows' tokens, as far as they were asked for
        self.seeds: dict[int, int] = {}
        self.tables: dict[int, list[list[int]]] = {}  # per KV group
        self.pools: dict[int, FakePool] = {}
        self.bad_seq_ids: set[int] = set()
        self.bad_row_error = "logits are not finite"
        self.num_copies = 0
        self.num_computed_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        for fork in plan.forks:
            assert fork.child_seq_id not in self.rows
            parent = self.rows[fork.parent_seq_id]
            assert fork.num_tokens <= len(parent)
            self.rows[fork.child_seq_id] = parent[: fork.num_tokens]
            self.tables[fork.child_seq_id] = [list(t) for t in self.tables[fork.parent_seq_id]]
            self.seeds[fork.child_seq_id] = fork.seed
        for seq_id in plan.removed_seq_ids:
            del self.rows[seq_id]
            self.values.pop(seq_id, None)
            self.pools.pop(seq_id, None)
            del self.tables[seq_id]
        for new in plan.new_rows:
            assert new.seq_id not in self.rows
            self.rows[new.seq_id] = [*new.prompt_token_ids, *new.output_token_ids]
            self.tables[new.seq_id] = [[] for _ in self.windows]
            self.seeds[new.seq_id] = new.seed
            if new.pooling is not None:
                self.pools[new.seq_id] = FakePool(new.pooling)
        self._swap(plan)
        self._copy(plan)
        for row in plan.rows:
            self._write(row)
        for row in plan.rows:
            self._read(row)
        results = []
        for row in plan.rows:
            if row.seq_id in self.pools:
                results += self._pool(row)
            elif row.num_samples or row.num_candidates or row.num_scored:
                results.append(self._sample(row))
        return StepResult(plan.step_id, tuple(results))

    def _swap(self, plan: StepPlan) -> None:
        size = self.block_size
        for _, device, host, to_host in plan.block_swaps:
            first = device * size
            if to_host:
                self.host[host] = {
                    i: self.slots[first + i] for i in range(size) if first + i in self.slots
                }
            else:
                for i in range(size):
                    self.slots.pop(first + i, None)
                self.slots.update({first + i: v for i, v in self.host[host].items()})

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
        assert row.num_tokens > 0
        self.num_computed_tokens += row.num_tokens
        self.rows[row.seq_id] += row.appended_token_ids
        values, mirrors = self._values(row.seq_id), self.tables[row.seq_id]
        for group, (mirror, table) in enumerate(zip(mirrors, row.block_tables, strict=True)):
            mirror[row.first_changed_block :] = table[row.first_changed_block :]
            first = self._first_seen(row, group) // self.block_size
            assert mirror[first:] == list(table[first:])
            for position in range(row.start + row.num_unwritten, row.start + row.num_tokens):
                self.slots[self._slot(mirror, position)] = values[position] + group

    def _read(self, row: ScheduledRow) -> None:
        values = self._values(row.seq_id)
        for group, mirror in enumerate(self.tables[row.seq_id]):
            for position in range(self._first_seen(row, group), row.start + row.num_tokens):
                assert self.slots[self._slot(mirror, position)] == values[position] + group

    def _first_seen(self, row: ScheduledRow, group: int) -> int:
        """The first position that a query of the row sees in this group's layers."""
        window = self.windows[group]
        return 0 if window is None else max(0, row.start - window + 1)

    def _values(self, seq_id: int) -> list[int]:
        """What the slots of a sequence hold, see ``state_values``."""
        values = self.values.setdefault(seq_id, [])
        for token_id in self.rows[seq_id][len(values) :]:
            values.append(hash((values[-1] if values else 0, token_id)))
        return values

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _sample(self, row: ScheduledRow) -> RowResult:
        tokens = self.rows[row.seq_id]
        if row.seq_id in self.bad_seq_ids:
            return RowResult(row.seq_id, (), error=self.bad_row_error)
        scores = self._score(row) if row.num_scored else None
        if not row.num_samples and not row.num_candidates:
            return RowResult(row.seq_id, (), prompt_logprobs=scores)
        assert row.start + row.num_tokens == len(tokens)
        if row.num_candidates:
            return RowResult(row.seq_id, (), candidates=candidates(tokens, row.num_candidates))
        seed = self.seeds[row.seq_id]
        samples = [next_token(tokens, seed + i) for i in range(row.num_samples)]
        tokens.append(samples[0])
        return RowResult(row.seq_id, samples, prompt_logprobs=scores)

    def _pool(self, row: ScheduledRow) -> list[RowResult]:
        """Nothing, or the embedding with the prompt's last token."""
        pool, end = self.pools[row.seq_id], row.start + row.num_tokens
        assert (row.num_samples, row.num_candidates, row.num_scored) == (0, 0, 0)
        values = self._values(row.seq_id)
        if pool.is_mean:
            assert row.start == pool.num_added
            pool.num_added = end
            pool.total += sum(values[row.start : end])
        if end < len(self.rows[row.seq_id]):
            return []
        if row.seq_id in self.bad_seq_ids:
            return [RowResult(row.seq_id, (), error="hidden states are not finite")]
        vector = pool.total if pool.is_mean else values[-1]
        return [RowResult(row.seq_id, (), embedding=str(vector).encode())]

    def _score(self, row: ScheduledRow) -> list[SampleLogprobs]:
        """A made-up log-probability for each position; the token before it is computed in this row."""
        positions = range(row.first_scored, row.first_scored + row.num_scored)
        assert row.start <= positions[0] - 1
        assert positions[-1] - 1 < row.start + row.num_tokens
        return [SampleLogprobs(-float(position), 1, ()) for position in positions]


class Bench:
    """A scheduler over the fake executor; checks every invariant after each step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        windows: Sequence[int | None] = (None,),
        budget: int = 16,
        max_num_seqs: int = 8,
        max_model_len: int = 200,
        watermark: float = 0.0,
        eos_token_ids: tuple[int, ...] = (EOS,),
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        preemption_mode: str = "swap",
        max_mixed_prefill_tokens: int | None = None,
        rates: ExecutorRates | None = None,
        policy: str = "fcfs",
        priority_aging_s: float = 0.0,
    ) -> None:
        self.memory = KVCacheManager(
            num_blocks,
            block_size,
            windows,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            block_bytes=block_size,
            max_step_tokens=budget,
        )
        limits = SchedulerLimits(
            budget,
            max_num_seqs,
            max_model_len,
            watermark,
            preemption_mode,
            max_mixed_prefill_tokens,
            policy,
            priority_aging_s,
        )
        self.scheduler = Scheduler(
            limits, self.memory, eos_token_ids, lambda: 1.0, rates or SLOW_COPIES
        )
        self.executor = FakeExecutor(block_size, windows)
        self.outputs: dict[str, list[int]] = {}  # of the first sequence
        self.children: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[str, SequenceUpdate] = {}  # of the last sequence to end
        self.logprobs: dict[tuple[str, int], float] = {}  # of finished hypotheses
        self.scores: dict[str, list[float]] = {}  # log-probabilities of prompt tokens
        self.embeddings: dict[str, bytes] = {}
        self.failed: set[tuple[str, int]] = set()
        self.plans: list[StepPlan] = []

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        cache_salt: str | None = None,
        resume: tuple[ResumedSequence, ...] = (),
        priority: int = 0,
        arrival_time: float = 0.0,
        **params: object,
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        self.scheduler.add(
            NewRequest(request_id, prompt, sampling, 0, arrival_time, priority, cache_salt, resume)
        )

    def embed(
        self, request_id: str, prompt: Sequence[int], kind: str, cache_salt: str | None = None
    ) -> None:
        nothing, pooling = SamplingParams(max_tokens=0), PoolingParams(kind)
        self.scheduler.add(
            NewRequest(request_id, prompt, nothing, 0, 0.0, cache_salt=cache_salt, pooling=pooling)
        )

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
            if update.cumulative_logprob is not None:
                self.logprobs[key] = update.cumulative_logprob
            if update.prompt_logprobs is not None:
                scores = self.scores.setdefault(update.request_id, [])
                scores += [one.logprob for one in update.prompt_logprobs]
            if update.embedding is not None:
                assert update.request_id not in self.embeddings
                self.embeddings[update.request_id] = update.embedding
            if update.error is not None:
                self.failed.add(key)
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
def expected_embedding() -> object:
    return fake_embedding


@pytest.fixture(scope="session")
def expected() -> object:
    return expected_output


NEVER = -1.0e9


def beam_search(
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset({EOS}),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[tuple[list[int], float]]:
    """Beam search over the fake model, written down a second time: plain lists, no blocks, no forks.

    Token ids and cumulative log-probabilities of the ``width`` best, best first.

    Follows the tensors of transformers' ``_beam_search``, its -1e9 included.
    """
    running: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[float, list[int], float, bool]] = [(NEVER, [], NEVER, False)] * width
    num_kept = max(2, 1 + len(stop_ids)) * width
    length, improvable = 0, True
    while True:
        everything = [
            (score + logprob, [*tokens, token])
            for tokens, score in running
            for token, logprob in candidates([*prompt, *tokens], num_kept)
        ]
        everything.sort(key=lambda pair: -pair[0])
        top = everything[:num_kept]
        hits = [tokens[-1] in stop_ids or length + 1 >= max_tokens for _, tokens in top]
        is_full = all(is_done for *_, is_done in finished) and early_stopping is True
        merged = list(finished)
        for rank, ((score, tokens), hit) in enumerate(zip(top, hits, strict=True)):
            is_done = hit and rank < width
            penalty = 0.0 if is_done else NEVER
            penalty += (NEVER if is_full else 0.0) + (0.0 if improvable else NEVER)
            merged.append(
                (score / (length + 1) ** length_penalty + penalty, tokens, score, is_done)
            )
        merged.sort(key=lambda entry: -entry[0])
        finished = merged[:width]
        alive = [(score, tokens) for (score, tokens), hit in zip(top, hits, strict=True) if not hit]
        running = [(tokens, score) for score, tokens in alive[:width]]
        length += 1
        if not running:
            break
        best = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        worst = min(score for score, *_ in finished)
        worst = worst if all(is_done for *_, is_done in finished) else NEVER
        improvable = improvable and running[0][1] / best**length_penalty > worst
        is_open = not (all(is_done for *_, is_done in finished) and early_stopping is True)
        if not (improvable and is_open):
            break
    return [(tokens, score) for _, tokens, score, _ in finished]


@pytest.fixture(scope="session")
def expected_beams() -> object:
    return beam_search
