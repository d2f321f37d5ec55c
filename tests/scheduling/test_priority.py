"""The policy "priority": who goes first, who makes way for whom, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.memory.block_demand import BlockDemand

Expected = Callable[..., list[int]]


def prompt(i: int, length: int = 6) -> list[int]:
    return [i % 90, *range(1, length)]


def order_of_ends(b: Any) -> list[str]:
    """Requests in the order in which they end."""
    ended: list[str] = []
    while b.scheduler.has_work:
        updates, _ = b.step()
        ended += [u.request_id for u in updates if u.finish_reason is not None]
    return ended


def test_lower_numbers_go_first_then_those_who_came_first(bench: Any) -> None:
    b = bench(max_num_seqs=1, policy="priority")
    for name, priority in {"d": 7, "b": 0, "a": -5, "c": 0, "e": 7}.items():
        b.add(name, prompt(ord(name)), priority=priority)
    assert order_of_ends(b) == ["a", "b", "c", "d", "e"]


def test_without_the_policy_priorities_are_not_looked_at(bench: Any) -> None:
    b = bench(max_num_seqs=1)
    for name, priority in {"x": 7, "y": 0, "z": -5}.items():
        b.add(name, prompt(ord(name)), priority=priority)
    assert order_of_ends(b) == ["x", "y", "z"]


def test_the_largest_numbers_are_told_apart(bench: Any) -> None:
    b = bench(max_num_seqs=1, policy="priority", priority_aging_s=60.0)
    b.add("second", prompt(1), priority=2**63 - 1)
    b.add("first", prompt(2), priority=2**63 - 2)
    b.add("least", prompt(3), priority=-(2**63))
    assert order_of_ends(b) == ["least", "first", "second"]


@pytest.mark.parametrize("num_host_blocks", [0, 32])
def test_a_running_request_makes_way_for_a_more_urgent_one_if_blocks_are_short(
    bench: Any, expected: Expected, num_host_blocks: int
) -> None:
    b = bench(
        num_blocks=10, block_size=4, budget=64, policy="priority", num_host_blocks=num_host_blocks
    )
    b.add("first", prompt(1, 16), max_tokens=4, priority=1)
    b.add("last", prompt(2, 16), max_tokens=4, priority=2)
    b.step()
    b.add("urgent", prompt(3, 16), max_tokens=4, priority=0)
    updates, _ = b.step()
    assert {u.request_id for u in updates} == {"first", "urgent"}  # the least urgent made way
    assert b.scheduler.counters.num_preemptions == 1
    assert order_of_ends(b) == ["first", "urgent", "last"]
    for i, name in enumerate(["first", "last", "urgent"], start=1):
        assert b.outputs[name] == expected(prompt(i, 16), 4)


def test_a_running_request_makes_way_if_seats_are_short(bench: Any, expected: Expected) -> None:
    b = bench(max_num_seqs=4, policy="priority", budget=64)
    b.add("wide", prompt(1), max_tokens=9, n=3, priority=3)
    b.add("narrow", prompt(2), max_tokens=9, priority=2)
    b.step()
    b.add("urgent", prompt(3), max_tokens=2, n=2, priority=1)
    updates, _ = b.step()
    assert {u.request_id for u in updates} == {"narrow", "urgent"}
    assert order_of_ends(b) == ["urgent", "urgent", "narrow", "wide", "wide", "wide"]
    for index in range(3):
        assert b.children["wide", index] == expected(prompt(1), 9, index)


def test_nobody_makes_way_for_an_equal(bench: Any) -> None:
    b = bench(max_num_seqs=1, policy="priority")
    b.add("one", prompt(1), max_tokens=5, priority=1)
    b.step()
    b.add("other", prompt(2), priority=1)
    assert order_of_ends(b) == ["one", "other"]
    assert b.scheduler.counters.num_preemptions == 0


def test_nobody_makes_way_in_vain(bench: Any) -> None:
    """With all of the less urgent one's blocks the head of the queue could not begin before the first ends."""
    b = bench(num_blocks=12, block_size=4, budget=64, policy="priority")
    b.add("first", prompt(1, 28), max_tokens=4, priority=0)
    b.add("small", prompt(2, 8), max_tokens=8, priority=2)
    b.step()
    b.add("big", prompt(3, 36), max_tokens=4, priority=1)
    b.step()
    b.step()
    assert b.scheduler.counters.num_preemptions == 0
    assert order_of_ends(b) == ["first", "big", "small"]


def test_blocks_that_others_share_are_not_counted_on(bench: Any) -> None:
    """The less urgent one has 5 blocks, of which 4 stay with the one it shares them with."""
    b = bench(num_blocks=8, block_size=4, budget=64, policy="priority")
    b.add("first", prompt(1, 18), max_tokens=2, priority=0)
    b.add("sharer", prompt(1, 18), max_tokens=2, priority=2)
    b.step()
    assert b.memory.pool.num_used_blocks == 6
    b.add("big", prompt(3, 16), max_tokens=1, priority=1)
    b.step()
    assert b.scheduler.counters.num_preemptions == 0


def test_a_step_of_priority_is_worth_some_time_of_waiting(bench: Any) -> None:
    b = bench(max_num_seqs=1, policy="priority", priority_aging_s=10.0)
    b.add("old", prompt(1), priority=2, arrival_time=0.0)
    b.add("later", prompt(2), priority=0, arrival_time=21.0)
    b.add("in time", prompt(3), priority=0, arrival_time=19.0)
    assert order_of_ends(b) == ["in time", "old", "later"]


def test_age_lets_a_request_go_first_but_preempts_nobody(bench: Any) -> None:
    b = bench(max_num_seqs=1, policy="priority", priority_aging_s=10.0)
    b.add("urgent", prompt(1), max_tokens=6, priority=0, arrival_time=100.0)
    b.step()
    b.add("old", prompt(2), priority=5, arrival_time=0.0)
    b.step()
    assert b.scheduler.counters.num_preemptions == 0
    assert order_of_ends(b) == ["urgent", "old"]


def test_low_priorities_wait_no_longer_than_their_age_allows(bench: Any) -> None:
    """F08: urgent requests arrive without end; each of the others begins once it is old enough."""
    aging_s, num_low = 3.0, 10
    b = bench(max_num_seqs=2, policy="priority", priority_aging_s=aging_s, budget=32)
    for i in range(num_low):
        b.add(f"low{i}", prompt(i), max_tokens=2, priority=2, arrival_time=0.0)
    ends: dict[str, int] = {}
    for second in range(60):
        for i in range(2):  # as much as two seats can do
            b.add(f"high{second}-{i}", prompt(50 + i), max_tokens=2, arrival_time=float(second))
        for _ in range(2):
            ends.update((u.request_id, second) for u in b.step()[0] if u.finish_reason)
    low = [ends[f"low{i}"] for i in range(num_low)]
    assert min(low) >= 2 * aging_s  # high first
    assert max(low) <= 2 * aging_s + num_low
    assert low == sorted(low)


def test_a_big_request_waits_no_longer_than_its_age_allows(bench: Any, expected: Expected) -> None:
    """F08: it needs nearly the whole pool, and small urgent ones keep coming."""
    b = bench(num_blocks=10, block_size=4, budget=64, policy="priority", priority_aging_s=5.0)
    ends: dict[str, int] = {}
    for second in range(40):
        b.add(f"small{second}", prompt(second), max_tokens=3, arrival_time=float(second))
        if second == 1:
            b.add("big", prompt(7, 34), max_tokens=2, priority=1, arrival_time=1.0)
        ends.update((u.request_id, second) for u in b.step()[0] if u.finish_reason)
    assert 5 <= ends["big"] <= 15
    assert b.outputs["big"] == expected(prompt(7, 34), 2)
    b.drain()
    assert {f"small{i}" for i in range(40)} <= set(b.outputs)


def test_strict_priorities_may_starve(bench: Any) -> None:
    b = bench(max_num_seqs=1, policy="priority", priority_aging_s=0.0)
    b.add("low", prompt(1), priority=1, arrival_time=0.0)
    for second in range(50):
        b.add(f"high{second}", prompt(2), max_tokens=1, arrival_time=float(second))
        b.step()
    assert "low" not in b.outputs
    b.drain()
    assert "low" in b.outputs


def test_an_urgent_prompt_holds_up_no_stream(bench: Any) -> None:
    b = bench(num_blocks=100, budget=16, policy="priority", max_num_seqs=4)
    for i in range(3):
        b.add(f"stream{i}", prompt(i), max_tokens=40, priority=1)
    for _ in range(4):
        b.step()
    b.add("long", prompt(9, 100), priority=0)
    for _ in range(6):
        updates, _ = b.step()
        assert {u.request_id for u in updates} >= {f"stream{i}" for i in range(3)}
    assert len(b.plans[-1].rows) == 4


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 12), st.integers(1, 3)),
        min_size=2,
        max_size=10,
    ),
    spare_blocks=st.integers(0, 6),
    max_num_seqs=st.integers(3, 6),
    aging_s=st.sampled_from([0.0, 2.0]),
)
def test_the_most_urgent_request_is_never_preempted(
    bench: Any,
    expected: Expected,
    requests: list[tuple[int, int, int, int]],
    spare_blocks: int,
    max_num_seqs: int,
    aging_s: float,
) -> None:
    """Requests (priority, prompt length, max_tokens, n) come one a step."""
    most = max(BlockDemand(4).of_request(length, new, n) for _, length, new, n in requests)
    b = bench(
        num_blocks=most + spare_blocks,
        budget=8,
        max_num_seqs=max_num_seqs,
        policy="priority",
        priority_aging_s=aging_s,
    )
    table = b.scheduler._table
    for i, (priority, length, max_tokens, n) in enumerate(requests):
        b.add(str(i), prompt(i, length), max_tokens, priority=priority, arrival_time=i, n=n)
        first = min(table.requests.values(), key=lambda r: r.rank)
        before = first.num_preemptions
        b.step()
        assert first.num_preemptions == before
    b.drain()
    for i, (_, length, max_tokens, n) in enumerate(requests):
        for index in range(n):
            assert b.children[str(i), index] == expected(prompt(i, length), max_tokens, index)
