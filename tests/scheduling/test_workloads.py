"""Random workloads over tiny pools, with everything that memory does: forks, beams, hits, swaps, aborts.

After each step every invariant is checked and the fake executor verifies that each row reads its own past;
at the end each sequence has the tokens that it would have had alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.memory.kv_cache_manager import num_blocks_needed

Expected = Callable[..., list[int]]


class Asked(NamedTuple):
    """One request of a workload."""

    prompt: Sequence[int]
    max_tokens: int
    arrival: int  # before this step
    abort: int | None  # before this step
    n: int
    child_abort: tuple[int, int] | None  # child, step
    is_beam_search: bool
    salt: str | None
    length_penalty: float
    early_stopping: bool | str

    def num_blocks(self, block_size: int) -> int:
        return num_blocks_needed(
            len(self.prompt),
            self.max_tokens,
            self.n,
            block_size,
            is_beam_search=self.is_beam_search,
        )


TRUNK = [(7 * i * i + 3 * i) % 95 for i in range(48)]


def prompts() -> st.SearchStrategy[list[int]]:
    """Many of them begin alike, some are equal, some end in each other's outputs' range."""
    suffix = st.lists(st.integers(0, 2), max_size=10)
    length = st.one_of(st.integers(0, 40), st.sampled_from([4, 8, 16, 32]))
    shared = st.builds(lambda n, rest: TRUNK[:n] + rest or [1], length, suffix)
    return st.one_of(shared, st.lists(st.integers(0, 95), min_size=1, max_size=40))


def asked() -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked,
        prompt=prompts(),
        max_tokens=st.integers(1, 30),
        arrival=st.integers(0, 20),
        abort=st.one_of(st.none(), st.none(), st.integers(0, 30)),
        n=st.integers(1, 4),
        child_abort=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 25))),
        is_beam_search=st.booleans(),
        salt=st.sampled_from([None, None, None, "a"]),
        length_penalty=st.sampled_from([1.0, 0.0, 2.0, -0.5]),
        early_stopping=st.sampled_from([False, True, "never"]),
    )


def run(b: Any, requests: Sequence[Asked], resets: set[int]) -> None:
    for step in range(6000):
        for i, one in enumerate(requests):
            if one.arrival == step:
                beams = {
                    "use_beam_search": True,
                    "length_penalty": one.length_penalty,
                    "early_stopping": one.early_stopping,
                }
                params = beams if one.is_beam_search else {}
                b.add(str(i), one.prompt, one.max_tokens, one.salt, n=one.n, **params)
            if one.abort == step and one.arrival <= step:
                b.scheduler.abort(str(i))
            if one.child_abort is not None and not one.is_beam_search:
                child, at = one.child_abort
                if at == step and one.arrival <= step:
                    b.scheduler.abort_sequence(str(i), child % one.n)
        if step in resets:
            b.memory.reset_prefix_cache()
        b.scheduler.check()
        if b.scheduler.has_work:
            b.step()
        elif step > max(one.arrival for one in requests):
            return
    raise AssertionError("the work never ends")


def verify(b: Any, requests: Sequence[Asked], expected: Expected, beams: Any) -> None:
    assert b.memory.pool.num_used_blocks == 0
    assert b.memory.num_used_slots == 0
    assert b.memory.pool.num_references == 0
    assert not b.memory.cache.host._holds
    assert b.executor.rows == {}
    for i, one in enumerate(requests):
        is_aborted = one.abort is not None and one.abort >= one.arrival
        if one.is_beam_search:
            _verify_beams(b, str(i), one, beams, is_aborted=is_aborted)
            continue
        for index in range(one.n):
            whole = expected(one.prompt, one.max_tokens, index)
            got = b.children.get((str(i), index), [])
            assert got == whole[: len(got)]
            child = one.child_abort
            is_cut = child is not None and child[0] % one.n == index and child[1] >= one.arrival
            if not is_cut and not is_aborted:
                assert got == whole


def _verify_beams(b: Any, name: str, one: Asked, beams: Any, *, is_aborted: bool) -> None:
    got = [b.children[name, i] for i in range(one.n) if (name, i) in b.children]
    if is_aborted and not got:
        return
    wanted = beams(
        one.prompt,
        width=one.n,
        max_tokens=one.max_tokens,
        length_penalty=one.length_penalty,
        early_stopping=one.early_stopping,
    )
    assert got == [tokens for tokens, _ in wanted]
    for index, (_, logprob) in enumerate(wanted):
        assert abs(b.logprobs[name, index] - logprob) < 1e-9


@given(
    requests=st.lists(asked(), min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    spare_blocks=st.integers(0, 12),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    enable_prefix_caching=st.booleans(),
    num_host_blocks=st.sampled_from([0, 2, 8, 64]),
    preemption_mode=st.sampled_from(["swap", "recompute", "auto"]),
    resets=st.sets(st.integers(0, 40), max_size=2),
)
@settings(deadline=None)
def test_any_workload_ends_with_the_right_tokens_and_an_empty_pool(
    bench: Any,
    expected: Expected,
    expected_beams: Any,
    requests: list[Asked],
    block_size: int,
    spare_blocks: int,
    budget: int,
    max_num_seqs: int,
    watermark: float,
    enable_prefix_caching: bool,
    num_host_blocks: int,
    preemption_mode: str,
    resets: set[int],
) -> None:
    requests = [one._replace(n=min(one.n, max_num_seqs)) for one in requests]
    b = bench(
        num_blocks=max(one.num_blocks(block_size) for one in requests) + spare_blocks,
        block_size=block_size,
        budget=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        watermark=watermark,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        preemption_mode=preemption_mode,
    )
    run(b, requests, resets)
    verify(b, requests, expected, expected_beams)


def pressing_workload(random: Random, max_num_seqs: int) -> list[Asked]:
    """More work than a tiny pool holds at once, much of it beginning alike."""
    requests = []
    for _ in range(random.randint(4, 12)):
        trunk = TRUNK[: random.choice((0, 4, 8, 16, 17, 23, 32, 40))]
        suffix = [random.randint(0, 1) for _ in range(random.randint(0, 8))]
        requests.append(
            Asked(
                prompt=trunk + suffix or [1],
                max_tokens=random.randint(8, 40),
                arrival=random.randint(0, 6) if random.random() < 0.7 else random.randint(0, 60),
                abort=random.randint(0, 60) if random.random() < 0.1 else None,
                n=random.randint(1, min(4, max_num_seqs)),
                child_abort=(random.randint(0, 3), random.randint(1, 60))
                if random.random() < 0.2
                else None,
                is_beam_search=random.random() < 0.3,
                salt="a" if random.random() < 0.1 else None,
                length_penalty=random.choice((1.0, 0.0, 2.0)),
                early_stopping=random.choice((False, True, "never")),
            )
        )
    return requests


@given(seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_a_pool_under_pressure_preempts_and_swaps_and_loses_nothing(
    bench: Any, expected: Expected, expected_beams: Any, seed: int
) -> None:
    random = Random(seed)
    max_num_seqs = random.randint(2, 8)
    block_size = random.choice((1, 2, 4, 5, 8, 16))
    requests = pressing_workload(random, max_num_seqs)
    least = max(one.num_blocks(block_size) for one in requests)
    b = bench(
        num_blocks=least + random.randint(0, least // 4),
        block_size=block_size,
        budget=random.randint(max_num_seqs, 48),
        max_num_seqs=max_num_seqs,
        watermark=random.choice((0.0, 0.0, 0.05)),
        enable_prefix_caching=random.random() < 0.7,
        num_host_blocks=random.choice((0, 4, 16, 400)),
        preemption_mode=random.choice(("swap", "swap", "recompute", "auto")),
    )
    run(b, requests, {random.randint(0, 60)} if random.random() < 0.2 else set())
    verify(b, requests, expected, expected_beams)
