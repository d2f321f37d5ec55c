"""Who is let in: what a request is counted with, what others are owed, and when the head is looked at again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.engine.api import ResumedSequence
from octavo.engine.memory.block_demand import BlockDemand
from octavo.engine.scheduling.admitter import RETRY_STEPS

Expected = Callable[..., list[int]]

BEAMS = {"use_beam_search": True}


def first_step(b: Any, seq_id: int) -> int:
    """The step that introduced a sequence to the executor."""
    return next(
        step for step, plan in enumerate(b.plans) for new in plan.new_rows if new.seq_id == seq_id
    )


def is_admitted(b: Any, request_id: str) -> bool:
    request = b.scheduler._table.requests.get(request_id)
    return request is None or request.scheduled_time is not None


# --- owed, and kept free -------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, BEAMS])
def test_admission_counts_what_sequences_that_do_not_run_yet_are_owed(
    bench: Any, params: dict[str, Any]
) -> None:
    """Four sequences of a prompt of 1.5 blocks will copy its half-full block, three of them to free ones."""
    b = bench(num_blocks=9, block_size=4, budget=64)
    b.add("wide", [1, 2, 3, 4, 5, 6], max_tokens=2, n=4, **params)
    b.add("next", list(range(50, 70)), max_tokens=3)
    b.step()
    assert b.memory.pool.num_used_blocks == 2  # and 5 more would fit now
    assert not is_admitted(b, "next")
    b.drain()
    assert b.scheduler.counters.num_preemptions == 0
    assert set(b.finished) == {"wide", "next"}


def test_admission_counts_the_output_that_forks_have_yet_to_compute_again(
    bench: Any, expected: Expected
) -> None:
    b = bench(num_blocks=9, block_size=4, budget=64)
    prompt = [1] * 8
    outputs = [expected(prompt, 12, index) for index in range(2)]
    resume = tuple(ResumedSequence(tuple(output)) for output in outputs)
    b.add("resumed", prompt, max_tokens=13, n=2, resume=resume)
    b.add("next", [2] * 8, max_tokens=2)
    b.step()
    assert not is_admitted(b, "next")  # 2 + 2 * 3 of 9 blocks are spoken for, and it wants 2
    b.drain()
    assert b.scheduler.counters.num_preemptions == 0
    for index in range(2):
        assert b.children["resumed", index] == expected(prompt, 13, index)[12:]


def test_admission_leaves_the_watermark_free_while_others_run(bench: Any) -> None:
    b = bench(num_blocks=20, block_size=4, budget=64, watermark=0.25)
    b.add("running", [1] * 16, max_tokens=9)
    b.step()
    assert b.memory.pool.num_used_blocks == 4
    b.add("fits", [2] * 40, max_tokens=2)  # leaves 6 blocks, one of which "running" takes now
    b.step()
    assert is_admitted(b, "fits")
    b.add("too big", [3], max_tokens=1)
    b.step()
    assert not is_admitted(b, "too big")
    b.drain()
    assert set(b.finished) == {"running", "fits", "too big"}


def test_while_nothing_runs_there_is_no_watermark(bench: Any) -> None:
    b = bench(num_blocks=20, block_size=4, budget=128, watermark=0.25)
    b.add("whole pool", [1] * 76, max_tokens=4)
    b.step()
    assert is_admitted(b, "whole pool")


def test_beams_that_are_not_born_have_seats(bench: Any) -> None:
    b = bench(max_num_seqs=4)
    b.add("beams", [1, 2, 3], max_tokens=6, n=4, **BEAMS)
    b.add("next", [2], max_tokens=2)
    b.step()
    assert not is_admitted(b, "next")
    b.drain()
    assert max(len(plan.rows) for plan in b.plans) == 4


def test_beams_wait_until_there_is_a_seat_for_each(bench: Any) -> None:
    b = bench(max_num_seqs=4)
    b.add("running", [2], max_tokens=6)
    b.step()
    b.add("beams", [1, 2, 3], max_tokens=6, n=4, **BEAMS)
    b.drain()
    assert first_step(b, 1) == 6
    assert max(len(plan.rows) for plan in b.plans) == 4


def test_beams_are_admitted_with_a_block_for_each(bench: Any) -> None:
    """A prompt of 1.5 blocks and four beams: two blocks, and three copies of the half-full one."""
    b = bench(num_blocks=9, block_size=4, budget=64)
    b.add("running", [1] * 17, max_tokens=3)  # 5 blocks
    b.step()
    b.add("beams", [1, 2, 3, 4, 5, 6], max_tokens=2, n=4, **BEAMS)
    b.step()
    assert not is_admitted(b, "beams")
    b.drain()
    assert b.scheduler.counters.num_preemptions == 0


def test_a_hit_inside_a_block_is_given_up_where_its_copy_would_need_a_block_too_many(
    bench: Any, expected: Expected
) -> None:
    b = bench(num_blocks=3, block_size=8, budget=64)
    first, second = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, *[9] * 12]
    b.add("first", first, max_tokens=1)
    b.drain()
    b.add("second", second, max_tokens=5)
    b.drain()
    assert b.outputs["second"] == expected(second, 5)
    assert b.scheduler.counters.prefix_cache_hits == 0


# --- looked at again -----------------------------------------------------------------------------


def counted_matches(b: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lookups each step made; the last one is that of the current step."""
    counts = [0]
    match, step = b.memory.match, b.step

    def count(*args: Any) -> Any:
        counts[-1] += 1
        return match(*args)

    def counted_step() -> Any:
        counts.append(0)
        return step()

    monkeypatch.setattr(b.memory, "match", count)
    monkeypatch.setattr(b, "step", counted_step)
    return counts


def test_a_head_that_does_not_fit_is_looked_up_now_and_then_only(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(num_blocks=32, block_size=4, budget=64)
    b.add("running", [1] * 5, max_tokens=60)
    b.step()
    counts = counted_matches(b, monkeypatch)
    b.add("head", [2] * 124, max_tokens=1)
    for _ in range(3 * RETRY_STEPS):
        b.step()
    assert not is_admitted(b, "head")
    assert sum(counts) == 3
    assert [step for step, count in enumerate(counts) if count] == [1, 17, 33]


def test_a_head_is_admitted_in_the_step_in_which_its_blocks_are_free(bench: Any) -> None:
    b = bench(num_blocks=32, block_size=4, budget=128)
    b.add("goes on", [1] * 5, max_tokens=60)
    b.add("ends", [3] * 41, max_tokens=7)
    b.step()
    b.add("head", [2] * 80, max_tokens=1)
    while "ends" not in b.finished:
        assert not is_admitted(b, "head")
        b.step()
    assert not is_admitted(b, "head")
    b.step()
    assert is_admitted(b, "head")


def test_another_head_is_looked_up_at_once(bench: Any) -> None:
    b = bench(num_blocks=32, block_size=4, budget=128)
    b.add("goes on", [1] * 5, max_tokens=60)
    b.step()
    b.add("too big", [2] * 124, max_tokens=1)
    b.add("small", [3], max_tokens=1)
    b.step()
    assert not is_admitted(b, "too big")
    b.scheduler.abort("too big")
    b.step()
    assert is_admitted(b, "small")


def test_a_head_is_looked_up_again_when_its_prefix_may_have_been_cached_meanwhile(
    bench: Any, expected: Expected
) -> None:
    """ "running" fills the block that the head lacks; no block is freed by that."""
    size = 2 * RETRY_STEPS
    prompt = list(range(size))
    b = bench(num_blocks=4, block_size=size, budget=256)
    b.add("running", prompt, max_tokens=60)
    while b.memory.pool.num_used_blocks < 2:
        b.step()
    for _ in range(RETRY_STEPS - 2):
        b.step()
    turns = prompt + expected(prompt, size) + [7]
    b.add("head", [*turns, *[7] * size], max_tokens=1)
    for _ in range(RETRY_STEPS):
        b.step()
        assert not is_admitted(b, "head")
    b.step()
    assert is_admitted(b, "head")
    assert b.scheduler.num_running == 1
    b.drain()
    assert b.outputs["running"] == expected(prompt, 60)


def test_a_request_waits_until_a_windows_blocks_are_free_too(
    bench: Any, expected: Expected
) -> None:
    """16 tokens take 4 blocks of each group; "first" leaves 6 of 14 when it decodes."""
    b = bench(num_blocks=14, windows=(None, 8), budget=16, enable_prefix_caching=False)
    b.add("first", list(range(16)), max_tokens=20)
    b.add("second", list(range(30, 46)), max_tokens=4)
    for _ in range(3):
        b.step()
    assert b.memory.pool.num_free_blocks == 6
    assert not is_admitted(b, "second")
    b.drain()
    assert b.outputs["first"] == expected(list(range(16)), 20)
    assert b.outputs["second"] == expected(list(range(30, 46)), 4)


# --- the door's arithmetic -----------------------------------------------------------------------


@given(
    num_prompt_tokens=st.integers(1, 40),
    max_tokens=st.integers(1, 24),
    n=st.integers(1, 4),
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    is_beam_search=st.booleans(),
    enable_prefix_caching=st.booleans(),
    num_host_blocks=st.sampled_from([0, 8]),
    num_equal_tokens=st.integers(0, 40),
    budget=st.integers(4, 80),
    windows=st.sampled_from([(None,), (None,), (1,), (6, None), (None, 9, 9)]),
)
@example(13, 1, 4, 4, True, True, 0, 13, 64, (None,))
def test_a_request_finishes_alone_in_as_many_blocks_as_the_door_asks_for(
    bench: Any,
    expected: Expected,
    expected_beams: Any,
    num_prompt_tokens: int,
    max_tokens: int,
    n: int,
    block_size: int,
    is_beam_search: bool,
    enable_prefix_caching: bool,
    num_host_blocks: int,
    num_equal_tokens: int,
    budget: int,
    windows: tuple[int | None, ...],
) -> None:
    prompt = [(7 * i * i + 3 * i) % 95 for i in range(num_prompt_tokens)]
    b = bench(
        num_blocks=BlockDemand(block_size, windows, budget).of_request(
            num_prompt_tokens, max_tokens, n, is_beam_search=is_beam_search
        ),
        block_size=block_size,
        windows=windows,
        budget=budget,
        watermark=0.5,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
    )
    beams = BEAMS if is_beam_search else {}
    earlier: Sequence[int] = [*prompt[:num_equal_tokens], 95][:num_prompt_tokens]
    b.add("alike", earlier, max_tokens=1)
    b.drain()
    for request_id in ("first", "again"):
        b.add(request_id, prompt, max_tokens, n=n, **beams)
        b.drain()
    assert b.scheduler.counters.num_preemptions == 0
    wanted = [expected(prompt, max_tokens, index) for index in range(n)]
    if is_beam_search:
        wanted = [tokens for tokens, _ in expected_beams(prompt, width=n, max_tokens=max_tokens)]
    for request_id in ("first", "again"):
        assert [b.children[request_id, index] for index in range(n)] == wanted
