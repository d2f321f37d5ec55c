"""What preemption chooses, what it moves, and that a request which comes back is the one that went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.api import FinishReason
from octavo.engine.scheduling.preemption import MIN_STEP_TOKENS, WEIGHT, Rates
from octavo.engine.service import core
from octavo.engine.service.core import EngineCore
from octavo.engine.step import ExecutorRates, StepPlan, StepResult

Expected = Callable[..., list[int]]


# --- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill_rate", "swap_rate", "num_bytes", "num_tokens", "prefers_swap"),
    [
        (1.0, 10.0, 100, 21, True),  # 20 s there and back, 21 s of computing
        (1.0, 10.0, 100, 20, False),  # a tie
        (1.0, 10.0, 100, 19, False),
        (2.0, 10.0, 100, 39, False),  # twice as fast a model
        (2.0, 10.0, 100, 41, True),
        (1.0, 20.0, 100, 11, True),  # twice as fast a copy
        (1.0, 0.0, 1, 1000, False),  # nobody knows how fast a copy is
        (0.0, 10.0, 1000, 1, True),  # nobody knows how fast the model is
        (0.0, 0.0, 1, 1, False),
    ],
)
def test_swapping_must_be_faster_than_computing_again(
    prefill_rate: float, swap_rate: float, num_bytes: int, num_tokens: int, prefers_swap: bool
) -> None:
    rates = Rates(ExecutorRates(prefill_rate, swap_rate))
    assert rates.prefers_swap(num_bytes, num_tokens) is prefers_swap


def test_nothing_is_swapped_before_a_rate_is_known() -> None:
    rates = Rates()
    assert not rates.prefers_swap(1, 1_000_000)
    rates.note_swap(100, 1.0)
    assert rates.prefers_swap(1, 1)


def test_rates_move_towards_what_is_observed() -> None:
    rates = Rates()
    rates.note_step(100, 2.0)
    rates.note_swap(300, 3.0)
    assert (rates.prefill_tokens_per_s, rates.swap_bytes_per_s) == (50.0, 100.0)
    rates.note_step(300, 2.0)
    rates.note_swap(400, 2.0)
    assert rates.prefill_tokens_per_s == pytest.approx(50 + WEIGHT * 100)
    assert rates.swap_bytes_per_s == pytest.approx(100 + WEIGHT * 100)


def test_small_steps_and_no_time_at_all_say_nothing_about_rates() -> None:
    rates = Rates(ExecutorRates(7.0, 9.0))
    rates.note_step(MIN_STEP_TOKENS - 1, 1.0)
    rates.note_step(1000, 0.0)
    rates.note_step(1000, -1.0)
    rates.note_swap(0, 1.0)
    rates.note_swap(1000, 0.0)
    assert (rates.prefill_tokens_per_s, rates.swap_bytes_per_s) == (7.0, 9.0)
    rates.note_step(MIN_STEP_TOKENS, 1.0)
    assert rates.prefill_tokens_per_s > 7.0


class TimedExecutor:
    """The fake executor on a clock of its own: each step takes ``step_s``, of which ``swap_s`` if it swaps."""

    def __init__(self, executor: Any, step_s: float, swap_s: float) -> None:
        self.now = 0.0
        self._executor = executor
        self._step_s = step_s
        self._swap_s = swap_s

    def perf_counter(self) -> float:
        return self.now

    def submit(self, plan: StepPlan) -> Any:
        self.now += self._step_s
        result: StepResult = self._executor.run(plan)
        if plan.block_swaps:
            result = replace(result, swap_s=self._swap_s)
        return SimpleNamespace(result=lambda: result)


def timed_core(monkeypatch: pytest.MonkeyPatch, b: Any, step_s: float, swap_s: float) -> EngineCore:
    executor = TimedExecutor(b.executor, step_s, swap_s)
    monkeypatch.setattr(core, "time", executor)
    b.scheduler.rates.prefill_tokens_per_s = b.scheduler.rates.swap_bytes_per_s = 0.0
    return EngineCore(b.scheduler, executor, check_invariants=True)


def test_the_engine_learns_how_fast_prompts_are_from_steps_that_are_mostly_prompts(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(num_blocks=200, budget=256, max_num_seqs=100)
    engine = timed_core(monkeypatch, b, step_s=2.0, swap_s=0.0)
    for i in range(70):
        b.add(str(i), [i], max_tokens=4)
    engine.step()  # 70 prompts of one token: as slow as decoding
    engine.step()
    assert b.plans == []
    assert b.scheduler.rates.prefill_tokens_per_s == 0.0
    b.add("long", [5] * 80, max_tokens=4)
    engine.step()  # 70 tokens decoded, 80 of a prompt
    assert b.scheduler.rates.prefill_tokens_per_s == (70 + 80) / 2.0
    engine.step()
    assert b.scheduler.rates.prefill_tokens_per_s == (70 + 80) / 2.0


def test_the_engine_takes_the_time_of_swaps_out_of_the_steps(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(num_blocks=200, budget=256, num_host_blocks=8)
    engine = timed_core(monkeypatch, b, step_s=2.0, swap_s=0.5)
    b.add("a", [1] * 9, max_tokens=20)
    engine.step()
    suspend(b, "a")
    b.add("b", [2] * 80, max_tokens=1)
    engine.step()  # 3 blocks of 4 bytes out, the half-full one back: the others are still there
    assert b.scheduler.rates.swap_bytes_per_s == (3 + 1) * 4 / 0.5
    assert b.scheduler.rates.prefill_tokens_per_s == (80 + 1) / 1.5


# --- swapped out or computed anew ----------------------------------------------------------------


def suspend(b: Any, request_id: str) -> Any:
    """Preempt a request between two steps, by swapping it out if its mode says so."""
    request = b.scheduler._table.requests[request_id]
    b.scheduler._preemption._swap_out(request)
    b.scheduler._table.suspend(request)
    return request


def two_too_many(bench: Any, **limits: Any) -> Any:
    """Two requests that do not fit together; the second is preempted."""
    b = bench(num_blocks=10, block_size=4, budget=32, num_host_blocks=32, **limits)
    b.add("first", [1] * 9, max_tokens=20)
    b.add("second", [2] * 9, max_tokens=20)
    b.drain()
    assert b.scheduler.counters.num_preemptions > 0
    return b


@pytest.mark.parametrize(("swap_rate", "is_swapped"), [(100.0, True), (1.0, False), (0.0, False)])
def test_mode_auto_swaps_if_copies_are_fast_and_computes_again_if_not(
    bench: Any, expected: Expected, swap_rate: float, is_swapped: bool
) -> None:
    b = two_too_many(bench, preemption_mode="auto", rates=ExecutorRates(1.0, swap_rate))
    assert bool(b.scheduler.counters.num_preemptions_by_swap) is is_swapped
    assert b.outputs == {"first": expected([1] * 9, 20), "second": expected([2] * 9, 20)}


@pytest.mark.parametrize(("mode", "swap_rate"), [("swap", 0.0), ("recompute", 100.0)])
def test_the_other_modes_ask_no_rates(bench: Any, mode: str, swap_rate: float) -> None:
    b = two_too_many(bench, preemption_mode=mode, rates=ExecutorRates(1.0, swap_rate))
    assert bool(b.scheduler.counters.num_preemptions_by_swap) is (mode == "swap")


def test_without_prefix_caching_the_host_tier_is_empty_when_the_work_is_done(bench: Any) -> None:
    b = two_too_many(bench, enable_prefix_caching=False)
    assert b.scheduler.counters.num_preemptions_by_swap > 0
    assert b.memory.cache.host.num_used_blocks == 0


def test_what_comes_back_from_the_host_tier_stays_findable_with_prefix_caching(bench: Any) -> None:
    b = two_too_many(bench)
    assert b.scheduler.counters.num_preemptions_by_swap > 0
    hits = b.scheduler.counters.prefix_cache_hits
    b.add("third", [2] * 9, max_tokens=1)
    b.drain()
    assert b.scheduler.counters.prefix_cache_hits == hits + 8


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_swapped_request_computes_at_most_one_token_of_each_sequence_again(
    bench: Any, expected: Expected, n: int, enable_prefix_caching: bool
) -> None:
    b = bench(
        num_blocks=24,
        block_size=4,
        budget=64,
        num_host_blocks=64,
        enable_prefix_caching=enable_prefix_caching,
    )
    b.add("first", [1] * 9, max_tokens=40)
    b.add("second", [2] * 9, max_tokens=25, n=n)
    b.step()
    b.add("third", [3] * 9, max_tokens=25, n=n)
    b.drain()
    counters = b.scheduler.counters
    assert counters.num_preemptions_by_swap == counters.num_preemptions > 0
    alone = (9 + 39) + 2 * (9 + n * 24)
    assert b.executor.num_computed_tokens - alone <= n * counters.num_preemptions
    for index in range(n):
        assert b.children["second", index] == expected([2] * 9, 25, index)
        assert b.children["third", index] == expected([3] * 9, 25, index)


def test_a_block_whose_copy_is_not_made_yet_is_not_findable(bench: Any, expected: Expected) -> None:
    """A request is preempted in the step that plans its copies-on-write: they are never executed."""
    b = bench(num_blocks=6, block_size=8, budget=64)
    b.add("first", [90] * 23, max_tokens=4)
    b.step()
    b.add("forks", [1, 2, 3, 4, 5, 6], max_tokens=6, n=3)
    b.drain()
    assert b.scheduler.counters.num_preemptions > 0
    for index in range(3):
        assert b.children["forks", index] == expected([1, 2, 3, 4, 5, 6], 6, index)


def test_a_block_whose_copy_is_not_made_yet_is_swapped_out_from_its_source(
    bench: Any, expected: Expected
) -> None:
    b = bench(num_blocks=6, block_size=8, budget=64, num_host_blocks=16)
    b.add("first", [90] * 23, max_tokens=4)
    b.step()
    b.add("forks", [1, 2, 3, 4, 5, 6], max_tokens=6, n=3)
    b.drain()
    assert b.scheduler.counters.num_preemptions_by_swap > 0
    for index in range(3):
        assert b.children["forks", index] == expected([1, 2, 3, 4, 5, 6], 6, index)


def test_a_suspended_beam_search_knows_nothing_of_what_follows_its_beams(
    bench: Any, expected_beams: Any
) -> None:
    b = bench(num_blocks=64, budget=5)
    for i in range(3):
        b.add(str(i), [i], max_tokens=40)
    b.step()
    b.add("beams", [1, 2, 3, 4, 5], max_tokens=8, n=4, use_beam_search=True)
    search = b.scheduler._table.requests["beams"].beam_search
    while len(search.candidates) != 2:  # of four beams
        b.step()
    suspend(b, "beams")
    assert search.candidates == {}
    b.drain()
    wanted = expected_beams([1, 2, 3, 4, 5], width=4, max_tokens=8)
    assert [b.children["beams", i] for i in range(4)] == [tokens for tokens, _ in wanted]


def test_sequences_that_come_back_together_take_no_block_that_admission_did_not_count(
    bench: Any, expected: Expected
) -> None:
    """One of them lost a block, and hits inside another's: a copy would need one block more."""
    prompt = [(7 * i * i + 3 * i) % 95 for i in range(8)]
    b = bench(num_blocks=5, block_size=8, budget=32, num_host_blocks=8)
    b.add("alike", prompt + expected(prompt, 5, 1) + [0] * 4, max_tokens=1)
    b.drain()
    b.add("forks", prompt, max_tokens=12, n=2)
    request = b.scheduler._table.requests["forks"]
    while len(request.sequences[1].token_ids) != 17:
        b.step()
    lost = request.sequences[1].blocks.tables[0][1]
    b.memory.pool.share([lost])  # an older request reads it: it is not moved
    b.scheduler._preemption._swap_out(request)
    b.memory.pool.release([lost])
    b.scheduler._table.suspend(request)
    b.memory.cache.forget(lost)  # the older request has ended, the block is evicted
    b.drain()
    for index in range(2):
        assert b.children["forks", index] == expected(prompt, 12, index)


# --- reset and failure, away and back ------------------------------------------------------------

LONG = list(range(20))


def swapped_out(bench: Any, n: int = 1) -> Any:
    """A bench whose only request, of a prompt of five full blocks, has been swapped out."""
    b = bench(num_blocks=40, block_size=4, budget=64, num_host_blocks=32)
    b.add("away", LONG, max_tokens=10, n=n)
    for _ in range(3):
        b.step()
    assert suspend(b, "away").host_block_ids
    return b


def num_hits(b: Any, prompt: Sequence[int]) -> tuple[int, int]:
    """Cached tokens that a new request of this prompt finds: in all, and in the host tier."""
    counters = b.scheduler.counters
    before = counters.prefix_cache_hits, counters.prefix_cache_host_hits
    b.add(f"probe {len(b.plans)}", prompt, max_tokens=1)
    b.drain()
    return counters.prefix_cache_hits - before[0], counters.prefix_cache_host_hits - before[1]


@pytest.mark.parametrize("n", [1, 3])
def test_after_a_reset_a_swapped_request_finds_its_own_and_nobody_else_does(
    bench: Any, expected: Expected, n: int
) -> None:
    b = swapped_out(bench, n)
    before = b.executor.num_computed_tokens
    b.memory.reset_prefix_cache()
    b.drain()
    for index in range(n):
        assert b.children["away", index] == expected(LONG, 10, index)
    assert b.executor.num_computed_tokens - before <= n * 8
    assert b.memory.cache.host.num_used_blocks == 0
    assert num_hits(b, LONG) == (0, 0)


def test_a_request_that_waits_while_the_cache_is_reset_does_not_find_what_was_swapped_out(
    bench: Any,
) -> None:
    b = swapped_out(bench)
    b.memory.reset_prefix_cache()
    b.add("behind", LONG, max_tokens=1)
    b.drain()
    assert b.scheduler.counters.prefix_cache_host_hits == 0
    assert b.finished["behind"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("n", [1, 3])
def test_what_fails_after_it_has_come_back_is_found_by_nobody(bench: Any, n: int) -> None:
    b = swapped_out(bench, n)
    b.executor.bad_seq_ids = {0, 1, 2}
    b.drain()
    assert b.finished["away"].finish_reason is FinishReason.ERROR
    b.executor.bad_seq_ids = set()
    assert num_hits(b, LONG) == (0, 0)


@pytest.mark.parametrize("params", [{}, {"n": 3}, {"n": 3, "use_beam_search": True}])
def test_the_half_full_last_block_of_what_fails_is_found_by_nobody(
    bench: Any, params: dict[str, Any]
) -> None:
    b = bench(block_size=8, budget=64)
    b.add("bad", LONG[:7], max_tokens=10, **params)
    b.executor.bad_seq_ids = {0}
    b.drain()
    assert b.finished["bad"].finish_reason is FinishReason.ERROR
    b.executor.bad_seq_ids = set()
    assert num_hits(b, LONG) == (0, 0)


def test_a_half_full_block_leaves_the_host_tier_with_its_owner(bench: Any) -> None:
    b = swapped_out(bench)
    assert b.memory.cache.host.num_used_blocks == 6
    b.drain()
    assert b.memory.cache.host.num_used_blocks == 5


def test_what_fails_is_not_found_where_it_was_evicted_to(bench: Any) -> None:
    b = bench(num_blocks=12, block_size=4, budget=64, num_host_blocks=32)
    b.add("good", LONG, max_tokens=1)
    b.drain()
    b.add("big", [9] * 40, max_tokens=1)
    b.drain()
    assert b.memory.cache.host.num_used_blocks > 0
    b.add("bad", LONG, max_tokens=1)  # takes the copies in the host tier, which stay there
    b.executor.bad_seq_ids = {2}
    b.drain()
    assert b.scheduler.counters.prefix_cache_host_hits > 0
    b.executor.bad_seq_ids = set()
    assert num_hits(b, LONG) == (0, 0)


def test_when_one_beam_fails_no_block_of_any_beam_is_found(bench: Any) -> None:
    b = bench(block_size=4, budget=32)
    b.add("a", list(range(10, 18)), max_tokens=30, n=3, use_beam_search=True)
    for _ in range(14):
        b.step()
    beams = list(b.scheduler._table.running)
    assert len(beams) == 3
    blocks = {block_id for s in beams for block_id in s.live_blocks.tables[0]}
    assert len({block_id for block_id in blocks if b.memory.pool.is_cached(block_id)}) > 3
    b.executor.bad_seq_ids = {s.seq_id for s in beams}
    b.step()
    assert not any(b.memory.pool.is_cached(block_id) for block_id in blocks)
    b.drain()
