"""Embedding requests in the scheduler: nothing is drawn, the prompt's end is theirs, hits only where they may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.api import FinishReason
from octavo.engine.scheduling.limits import SchedulingError
from octavo.engine.step import StepResult

Expected = Callable[..., Any]
LONG = [(5 * i * i + 2 * i) % 90 for i in range(50)]


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_an_embedding_comes_with_the_end_of_its_prompt(
    bench: Any, expected_embedding: Expected, kind: str
) -> None:
    b = bench(budget=16)
    b.embed("e", LONG, kind)
    updates = [b.step()[0] for _ in range(4)]
    assert updates[:3] == [[]] * 3
    (update,) = updates[3]
    assert (update.finish_reason, update.token_ids) == (FinishReason.STOP, ())
    assert update.embedding == expected_embedding(LONG, kind)
    assert update.scheduled_time == 1.0
    assert not any(row.num_samples for plan in b.plans for row in plan.rows)
    assert b.memory.pool.num_used_blocks == 0
    b.drain()
    assert b.executor.pools == {}
    counters = b.scheduler.counters
    assert (counters.num_prompt_tokens, counters.num_generation_tokens) == (50, 0)


def test_beside_generation(bench: Any, expected: Expected, expected_embedding: Expected) -> None:
    b = bench(budget=12)
    b.add("a", LONG[:9], max_tokens=12)
    b.embed("e", LONG, "mean")
    b.add("b", LONG[5:20], max_tokens=7, n=2)
    b.embed("f", LONG[3:30], "last")
    b.drain()
    assert b.children["a", 0] == expected(LONG[:9], 12)
    assert [b.children["b", i] for i in (0, 1)] == [expected(LONG[5:20], 7, i) for i in (0, 1)]
    assert b.embeddings == {
        "e": expected_embedding(LONG, "mean"),
        "f": expected_embedding(LONG[3:30], "last"),
    }


def test_only_the_last_token_is_computed_of_what_is_cached(
    bench: Any, expected_embedding: Expected
) -> None:
    b, prompt = bench(budget=64, block_size=4), LONG[:48]
    b.add("warm", prompt, max_tokens=1)
    b.drain()
    before, queries = b.executor.num_computed_tokens, b.scheduler.counters.prefix_cache_queries
    b.embed("last", prompt, "last")
    b.drain()
    assert b.executor.num_computed_tokens - before == 1
    assert b.finished["last"].num_cached_tokens == 47
    b.embed("mean", prompt, "mean")
    b.drain()
    assert b.executor.num_computed_tokens - before == 1 + 48
    assert b.finished["mean"].num_cached_tokens == 0
    assert b.scheduler.counters.prefix_cache_queries == queries + 48  # of the one that looked
    assert b.embeddings == {k: expected_embedding(prompt, k) for k in ("last", "mean")}


def test_what_a_mean_has_computed_is_found_by_others(bench: Any, expected: Expected) -> None:
    b, prompt = bench(budget=64, block_size=4), LONG[:48]
    b.embed("mean", prompt, "mean")
    b.drain()
    b.add("after", [*prompt, 1], max_tokens=3)
    b.drain()
    assert b.outputs["after"] == expected([*prompt, 1], 3)
    assert b.scheduler.counters.prefix_cache_hits == 48


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_what_is_interrupted_begins_anew(
    bench: Any, expected: Expected, expected_embedding: Expected, kind: str, mode: str
) -> None:
    b = bench(num_blocks=24, block_size=4, budget=8, num_host_blocks=32, preemption_mode=mode)
    b.add("first", [1] * 5, max_tokens=60)
    for _ in range(20):
        b.step()
    b.embed("e", LONG, kind)
    b.step()
    b.step()
    sequence = next(s for s in b.scheduler._table.running if s.request.request_id == "e")
    assert 0 < sequence.num_computed_tokens < 50
    b.scheduler._preemption.preempt(sequence.request, _nothing())
    is_swapped = bool(sequence.request.host_block_ids)
    assert is_swapped is (mode == "swap" and kind == "last")
    b.drain()
    assert b.embeddings == {"e": expected_embedding(LONG, kind)}
    assert b.outputs["first"] == expected([1] * 5, 60)
    assert b.finished["e"].num_preemptions == 1


def _nothing() -> Any:
    class Draft:
        def drop(self, _seq_ids: set[int]) -> None: ...

    return Draft()


def test_a_prompt_as_long_as_the_window(bench: Any, expected_embedding: Expected) -> None:
    prompt = [i % 90 for i in range(200)]
    b = bench(num_blocks=50, block_size=4, max_model_len=200)
    b.embed("e", prompt, "last")
    b.drain()
    assert b.embeddings == {"e": expected_embedding(prompt, "last")}


def test_a_row_that_is_not_finite_fails_alone(bench: Any, expected_embedding: Expected) -> None:
    b = bench(budget=64)
    b.embed("bad", LONG[:9], "mean")
    b.embed("good", LONG[9:20], "mean")
    b.executor.bad_seq_ids = {0}
    b.drain()
    assert b.finished["bad"].finish_reason is FinishReason.ERROR
    assert b.finished["bad"].embedding is None
    assert b.embeddings == {"good": expected_embedding(LONG[9:20], "mean")}


def test_an_executor_that_gives_no_embedding_breaks_an_invariant(bench: Any) -> None:
    b = bench(budget=64)
    b.embed("e", LONG, "last")
    plan = b.scheduler.schedule()
    with pytest.raises(SchedulingError, match="without its embedding"):
        b.scheduler.commit(plan, StepResult(plan.step_id, ()))


def test_aborted_half_way(bench: Any) -> None:
    b = bench(budget=8)
    b.embed("e", LONG, "mean")
    b.step()
    assert b.scheduler.abort("e")
    assert b.memory.pool.num_used_blocks == 0
    b.drain()
    assert b.executor.pools == {}
    assert b.embeddings == {}
