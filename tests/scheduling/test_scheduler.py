from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.api import FinishReason, ResumedSequence, SamplingParams
from octavo.engine.errors import NOTHING_LEFT
from octavo.engine.scheduling.limits import SchedulingError
from octavo.engine.scheduling.request import NewRequest

Expected = Callable[..., list[int]]


def test_one_request_runs_to_its_length(bench: Any, expected: Expected) -> None:
    b = bench()
    b.add("a", [1, 2, 3], max_tokens=5)
    b.drain()
    assert b.outputs["a"] == expected([1, 2, 3], 5)
    assert b.finished["a"].finish_reason is FinishReason.LENGTH
    assert b.memory.pool.num_used_blocks == 0


def test_long_prompt_is_computed_in_chunks_beside_running_rows(
    bench: Any, expected: Expected
) -> None:
    b = bench(budget=8)
    b.add("short", [1, 2], max_tokens=10)
    b.step()
    b.add("long", list(range(30)), max_tokens=2)
    updates = [b.step()[0] for _ in range(4)]
    assert all([u.request_id for u in step] == ["short"] for step in updates)
    b.drain()
    assert b.outputs == {
        "short": expected([1, 2], 10),
        "long": expected(list(range(30)), 2),
    }
    chunks = [row.num_tokens for plan in b.plans for row in plan.rows if row.seq_id == 1]
    assert chunks[:5] == [7, 7, 7, 7, 2]


def test_prompts_get_less_of_a_step_that_decodes(bench: Any, expected: Expected) -> None:
    """Alone a prompt has the whole budget; beside a decoding sequence the limit holds for all prompts together."""
    b = bench(budget=16, max_mixed_prefill_tokens=6)
    b.add("first", list(range(20)), max_tokens=12)
    b.step()
    b.step()
    b.add("second", list(range(50, 60)), max_tokens=3)
    b.add("third", list(range(80, 86)), max_tokens=3)
    b.drain()
    sizes = [[row.num_tokens for row in plan.rows] for plan in b.plans]
    assert sizes[:6] == [[16], [4], [1, 6], [1, 4, 2], [1, 1, 4], [1, 1, 1]]
    assert b.outputs == {
        "first": expected(list(range(20)), 12),
        "second": expected(list(range(50, 60)), 3),
        "third": expected(list(range(80, 86)), 3),
    }


def test_blocks_grow_one_at_a_time(bench: Any) -> None:
    b = bench(block_size=4)
    b.add("a", [1, 2, 3], max_tokens=10)
    used = []
    while b.scheduler.has_work:
        b.step()
        used.append(b.memory.pool.num_used_blocks)
    assert used[:6] == [1, 1, 2, 2, 2, 2]
    assert used[-1] == 0


def test_finished_blocks_are_reused_at_once(bench: Any) -> None:
    b = bench(block_size=4, enable_prefix_caching=False)
    b.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    b.step()
    first = b.plans[0].rows[0].block_tables[0]
    assert b.memory.pool.num_used_blocks == 0
    b.add("b", [7, 8, 9, 9, 9], max_tokens=2)
    b.step()
    assert set(b.executor.tables[1][0]) == set(first)


@pytest.mark.parametrize("watermark", [0.0, 0.1])
def test_preemption_recomputes_and_loses_nothing(
    bench: Any, expected: Expected, watermark: float
) -> None:
    b = bench(num_blocks=10, block_size=4, budget=32, watermark=watermark)
    prompts = {f"r{i}": [i + 1] * (3 + i) for i in range(5)}
    for request_id, prompt in prompts.items():
        b.add(request_id, prompt, max_tokens=20)
    b.drain()
    assert b.scheduler.counters.num_preemptions > 0
    assert b.outputs == {r: expected(p, 20) for r, p in prompts.items()}
    assert max(u.num_preemptions for u in b.finished.values()) > 0
    assert b.scheduler.counters.num_prompt_tokens == sum(map(len, prompts.values()))


def test_last_admitted_is_preempted_first_and_comes_back_first(bench: Any) -> None:
    b = bench(num_blocks=4, block_size=4, budget=32)
    b.add("first", [1] * 7, max_tokens=8)
    b.add("second", [2] * 7, max_tokens=8)
    b.step()
    b.add("third", [3], max_tokens=1)
    b.drain()
    assert b.finished["first"].num_preemptions == 0
    assert b.finished["second"].num_preemptions > 0
    admitted = [new.seq_id for plan in b.plans for new in plan.new_rows]
    assert admitted == [0, 1, 1, 2]


def test_head_of_the_queue_is_not_overtaken(bench: Any) -> None:
    b = bench(num_blocks=8, block_size=4, budget=64)
    b.add("running", [1] * 15, max_tokens=9)
    b.step()
    b.add("big", [2] * 28, max_tokens=2)
    for i in range(20):
        b.add(f"small{i}", [3], max_tokens=1)
    b.drain()
    admitted = [new.seq_id for plan in b.plans for new in plan.new_rows]
    assert admitted[:3] == [0, 1, 2]


def test_end_id_stops_and_ignore_eos_does_not(bench: Any, expected: Expected) -> None:
    first = expected([5, 6], 6)
    b = bench(eos_token_ids=(first[2],))
    b.add("stop", [5, 6], max_tokens=6)
    b.add("on", [5, 6], max_tokens=6, ignore_eos=True)
    b.drain()
    assert b.outputs["stop"] == first[:3]
    assert b.finished["stop"].finish_reason is FinishReason.STOP
    assert b.finished["stop"].stop_token_id is None
    assert b.outputs["on"] == first


def test_own_stop_id_is_named_and_beats_ignore_eos(bench: Any, expected: Expected) -> None:
    first = expected([5, 6], 6)
    b = bench()
    b.add("a", [5, 6], max_tokens=6, stop_token_ids=[first[1]], ignore_eos=True)
    b.drain()
    assert b.outputs["a"] == first[:2]
    assert b.finished["a"].stop_token_id == first[1]


def test_stop_ids_wait_for_min_tokens(bench: Any, expected: Expected) -> None:
    first = expected([5, 6], 6)
    b = bench()
    b.add("a", [5, 6], max_tokens=6, stop_token_ids=[first[1]], min_tokens=2)
    b.drain()
    assert len(b.outputs["a"]) > 2


def test_sequence_ends_at_the_window(bench: Any) -> None:
    b = bench(max_model_len=10)
    b.add("a", [1] * 8, max_tokens=50)
    b.drain()
    assert len(b.outputs["a"]) == 2
    assert b.finished["a"].finish_reason is FinishReason.LENGTH


def test_nonfinite_row_ends_alone(bench: Any, expected: Expected) -> None:
    b = bench()
    b.add("bad", [1, 2], max_tokens=4)
    b.add("good", [3, 4], max_tokens=4)
    b.executor.bad_seq_ids.add(0)
    b.drain()
    assert b.finished["bad"].finish_reason is FinishReason.ERROR
    assert b.finished["bad"].error == "logits are not finite"
    assert b.outputs["good"] == expected([3, 4], 4)
    assert b.scheduler.counters.num_nonfinite_rows == 1
    assert b.scheduler.counters.num_generation_tokens == 4


def test_a_row_with_nothing_left_to_draw_is_no_fault_of_the_model(bench: Any) -> None:
    b = bench()
    b.add("strict", [1, 2], max_tokens=4)
    b.executor.bad_seq_ids.add(0)
    b.executor.bad_row_error = NOTHING_LEFT
    b.drain()
    assert b.finished["strict"].error == NOTHING_LEFT
    assert b.scheduler.counters.num_nonfinite_rows == 0


def test_abort_frees_blocks_at_once_in_every_state(bench: Any) -> None:
    b = bench(max_num_seqs=1)
    b.add("running", [1] * 9, max_tokens=50)
    b.add("waiting", [2] * 9, max_tokens=50)
    b.step()
    assert b.scheduler.abort("waiting")
    assert b.scheduler.abort("running")
    assert b.memory.pool.num_used_blocks == 0
    assert not b.scheduler.abort("running")
    assert not b.scheduler.abort("never seen")
    b.drain()
    assert b.executor.rows == {}


def test_resumed_request_goes_on_where_it_was(bench: Any, expected: Expected) -> None:
    whole = expected([4, 4], 6)
    b = bench()
    b.scheduler.add(
        NewRequest(
            "a",
            [4, 4],
            SamplingParams(max_tokens=6),
            seed=0,
            arrival_time=0.0,
            resume=(ResumedSequence(tuple(whole[:2])),),
        )
    )
    b.drain()
    assert b.outputs["a"] == whole[2:]


def test_adding_a_live_id_twice_is_an_invariant_error(bench: Any) -> None:
    b = bench()
    b.add("a", [1])
    with pytest.raises(SchedulingError, match="twice"):
        b.add("a", [1])


def test_counting_rule_of_steps_and_tokens(bench: Any) -> None:
    b = bench()
    steps = []
    for i in range(10):
        b.add(f"r{i}", [i] * 7, max_tokens=10)
        while b.scheduler.has_work:
            steps.append(b.step()[1])
    steps = [n for n in steps if n]
    assert len(steps) == 100
    assert sum(steps) == 10 * (7 + 10)
    assert b.scheduler.counters.num_steps == 100


def test_waste_is_known_at_every_step(bench: Any) -> None:
    b = bench(block_size=4)
    b.add("a", [1] * 5, max_tokens=3)
    b.step()
    assert (b.memory.num_allocated_slots, b.memory.num_used_slots) == (8, 5)
    b.drain()
    counters = b.scheduler.counters
    assert (counters.kv_slot_steps_allocated, counters.kv_slot_steps_used) == (8 * 3, 5 + 6 + 7)


@pytest.mark.parametrize("length", [16, 23, 31, 32])
def test_forks_share_the_prompt_and_copy_on_write(
    bench: Any, expected: Expected, length: int
) -> None:
    prompt = list(range(length))
    b = bench(block_size=16, budget=64)
    b.add("a", prompt, max_tokens=9, n=4)
    b.step()
    full, is_partial = divmod(length, 16)
    assert b.memory.pool.num_used_blocks == full + bool(is_partial)
    assert b.memory.num_used_slots == length
    b.step()
    assert b.memory.pool.num_used_blocks == full + 4
    assert b.memory.num_used_slots == full * 16 + 4 * (is_partial + 1)
    b.drain()
    assert b.executor.num_copies == (3 if is_partial else 0)
    for index in range(4):
        assert b.children["a", index] == expected(prompt, 9, index)
    prefill = [row.num_tokens for plan in b.plans for row in plan.rows if row.num_tokens > 1]
    assert sum(prefill) == length


def test_forked_requests_are_preempted_whole_and_fork_again(bench: Any, expected: Expected) -> None:
    b = bench(num_blocks=20, block_size=4, budget=32)
    b.add("first", [1] * 6, max_tokens=20, n=2)
    b.add("second", [2] * 6, max_tokens=20, n=3)
    b.drain()
    assert b.finished["second"].num_preemptions > 0
    for request_id, token, n in (("first", 1, 2), ("second", 2, 3)):
        for index in range(n):
            assert b.children[request_id, index] == expected([token] * 6, 20, index)
    recomputed = [row for plan in b.plans for row in plan.rows if row.appended_token_ids]
    assert any(len(row.appended_token_ids) > 1 for row in recomputed)


def test_forks_after_a_preemption_take_up_what_is_still_cached(
    bench: Any, expected: Expected
) -> None:
    b = bench(num_blocks=64, block_size=4, budget=32)
    b.add("a", [1] * 6, max_tokens=20, n=3)
    for _ in range(12):
        b.step()
    before = b.executor.num_computed_tokens
    b.scheduler._table.suspend(b.scheduler._table.requests["a"])
    b.drain()
    for index in range(3):
        assert b.children["a", index] == expected([1] * 6, 20, index)
    recomputed = b.executor.num_computed_tokens - before - 3 * 9
    assert recomputed <= 1 + 3 * 4


def test_a_big_request_is_served_though_small_ones_keep_coming(
    bench: Any, expected: Expected
) -> None:
    b = bench(num_blocks=16, block_size=4, budget=16, watermark=0.1)
    big = list(range(40))
    for step in range(200):
        b.add(f"small {step}", [step % 90, 1, 2], max_tokens=6)
        if step == 20:
            b.add("big", big, max_tokens=24)
        b.step()
        if "big" in b.finished:
            break
    assert b.outputs["big"] == expected(big, 24)
    assert step <= 20 + 6 * 20 + 3 + 24
    b.drain()


def test_admitting_prompts_never_makes_anyone_give_up_memory(bench: Any) -> None:
    b = bench(num_blocks=20, block_size=4, budget=10, max_num_seqs=16)
    for i in range(30):
        b.add(str(i), [i] * (5 + i), max_tokens=1)
    b.drain()
    assert len(b.finished) == 30
    assert b.scheduler.counters.num_preemptions == 0


def test_seats_are_kept_for_sequences_that_have_not_forked(bench: Any) -> None:
    b = bench(budget=4, max_num_seqs=4)
    b.add("wide", [1] * 12, max_tokens=4, n=3)
    b.add("two", [2], max_tokens=4, n=2)
    b.step()
    b.drain()
    assert max(len(plan.rows) for plan in b.plans) <= 4
    admitted = [new.seq_id for plan in b.plans for new in plan.new_rows]
    assert admitted == [0, 3]


def test_a_child_that_ends_at_its_first_token_never_forks(bench: Any, expected: Expected) -> None:
    ends = [expected([5, 6], 1, index)[0] for index in range(3)]
    assert len(set(ends)) == 3
    for end in ends:
        b = bench(eos_token_ids=(end,))
        b.add("a", [5, 6], max_tokens=3, n=3)
        b.step()
        assert len(b.scheduler._table.running) == 2
        b.drain()
        assert sorted(len(b.children["a", index]) for index in range(3)) == [1, 3, 3]


def test_nonfinite_prompt_ends_all_its_sequences(bench: Any) -> None:
    b = bench()
    b.add("bad", [1, 2], max_tokens=4, n=3)
    b.executor.bad_seq_ids.add(0)
    updates, _ = b.step()
    assert [u.finish_reason for u in updates] == [FinishReason.ERROR] * 3
    b.drain()
    assert b.executor.rows == {}
