"""The policy "fair": tenants take turns, by weight, with tokens as the currency."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.api import SamplingParams
from octavo.engine.scheduling.request import NewRequest


def add(
    b: Any, name: str, tenant: str | None, weight: float = 1.0, max_tokens: int = 4, n: int = 1
) -> None:
    prompt = [ord(char) % 90 for char in name.ljust(6, "_")]
    sampling = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    b.scheduler.add(NewRequest(name, prompt, sampling, 0, 0.0, tenant=tenant, weight=weight))


def order_of_ends(b: Any) -> list[str]:
    ended: list[str] = []
    while b.scheduler.has_work:
        updates, _ = b.step()
        ended += [u.request_id for u in updates if u.finish_reason is not None]
    return ended


def one_seat(bench: Any) -> Any:
    return bench(max_num_seqs=1, policy="fair")


def test_who_sends_much_waits_behind_who_sends_little(bench: Any) -> None:
    b = one_seat(bench)
    for i in range(4):
        add(b, f"a{i}", "a")
    for i in range(2):
        add(b, f"b{i}", "b")
    assert order_of_ends(b) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_weight_is_a_share(bench: Any) -> None:
    b = one_seat(bench)
    for i in range(6):
        add(b, f"a{i}", "a", weight=2.0)
    for i in range(3):
        add(b, f"b{i}", "b")
    assert order_of_ends(b) == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"]


def test_tokens_count_not_requests(bench: Any) -> None:
    b = one_seat(bench)
    for i in range(3):
        add(b, f"a{i}", "a", max_tokens=4)  # 10 tokens each
    for i in range(3):
        add(b, f"b{i}", "b", max_tokens=14)  # 20 tokens each
    assert order_of_ends(b) == ["a0", "b0", "a1", "a2", "b1", "b2"]


def test_whoever_was_away_has_saved_nothing_up(bench: Any) -> None:
    b = one_seat(bench)
    for i in range(3):
        add(b, f"b{i}", "b")
    assert order_of_ends(b) == ["b0", "b1", "b2"]
    for i in range(2):
        add(b, f"b{i}", "b")
    for i in range(3):
        add(b, f"a{i}", "a")
    assert order_of_ends(b) == ["a0", "b0", "a1", "b1", "a2"]


@pytest.mark.parametrize("num_steps", [0, 5])
def test_what_was_not_used_is_given_back(bench: Any, num_steps: int) -> None:
    b = one_seat(bench)
    add(b, "wide", "a", max_tokens=90)
    for _ in range(num_steps):  # each a token; b's requests have 10
        b.step()
    b.scheduler.abort("wide")
    for i in range(4):
        add(b, f"b{i}", "b")
    add(b, "a0", "a")
    expected = ["b0", "b1", "a0", "b2", "b3"] if num_steps else ["b0", "a0", "b1", "b2", "b3"]
    assert order_of_ends(b) == expected


def test_a_tenants_own_requests_keep_their_order(bench: Any) -> None:
    b = one_seat(bench)
    add(b, "first", "a", max_tokens=90)
    add(b, "second", "a")
    b.scheduler.abort("first")
    add(b, "third", "a")
    assert order_of_ends(b) == ["second", "third"]


requests = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", None]),
        st.sampled_from([0.25, 1.0, 3.0]),
        st.integers(1, 9),
        st.integers(1, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


@given(requests)
def test_any_mix_ends_and_nothing_running_is_taken_a_turn_from(bench: Any, mix: Any) -> None:
    b = bench(max_num_seqs=3, policy="fair")
    expected = []
    for i, (tenant, weight, max_tokens, n, num_steps) in enumerate(mix):
        add(b, f"r{i}", tenant, weight, max_tokens, n)
        expected += [f"r{i}"] * n
        for _ in range(num_steps):
            if b.scheduler.has_work:
                b.step()
    order_of_ends(b)
    assert b.scheduler.counters.num_preemptions == 0
    assert not b.scheduler.has_work
    table = b.scheduler._table
    assert not table.requests
