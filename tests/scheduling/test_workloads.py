"""Random workloads over tiny pools, with everything that memory does: forks, beams, hits, swaps, aborts.

After each step every invariant is checked and the fake executor verifies that each row reads its own past;
at the end each sequence has the tokens that it would have had alone. What a failed row leaves behind is
spoiled, so that whoever finds it reads a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.api import ResumedSequence
from octavo.engine.memory.block_demand import BlockDemand, first_block
from octavo.engine.memory.block_hash import in_group
from octavo.engine.step import ExecutorRates

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
    follows: tuple[int, int, int] | None = None  # a turn after request, child, its first tokens
    failure: int | None = None  # its rows of this step are not finite
    resumed: tuple[int, ...] = ()  # tokens that each child has already; all of them: it is finished
    is_scored: bool = False  # wants its prompt's log-probabilities
    priority: int = 0
    pooling: str | None = None  # wants its prompt's embedding and nothing else

    def num_blocks(self, demand: BlockDemand) -> int:
        return demand.of_request(
            len(self.prompt), self.max_tokens, self.n, is_beam_search=self.is_beam_search
        )


Windows = tuple[int | None, ...]
WINDOWS: list[Windows] = [(None,), (None,), (1,), (7,), (20, None), (None, 5, 5), (3, 12)]
MAX_PROMPT, MAX_TURN = 100, 40
NOT_FINITE = -12345
TRUNK = [(7 * i * i + 3 * i) % 95 for i in range(48)]


def prompts() -> st.SearchStrategy[list[int]]:
    """Many of them begin alike, some are equal, some end in each other's outputs' range."""
    suffix = st.lists(st.integers(0, 2), max_size=10)
    length = st.one_of(st.integers(0, 40), st.sampled_from([4, 8, 16, 32]))
    shared = st.builds(lambda n, rest: TRUNK[:n] + rest or [1], length, suffix)
    return st.one_of(shared, st.lists(st.integers(0, 95), min_size=1, max_size=40))


def conversations(requests: Sequence[Asked], expected: Expected) -> list[Asked]:
    """Let each request that follows an earlier one begin with its prompt and some of its answer."""
    turns: list[Asked] = []
    for one in requests:
        if one.follows is not None and turns:
            index, child, num_tokens = one.follows
            earlier = turns[index % len(turns)]
            answer = expected(earlier.prompt, min(num_tokens, MAX_TURN), child % earlier.n)
            prompt = [*earlier.prompt, *answer, *one.prompt[:4]]
            one = one._replace(prompt=prompt[:MAX_PROMPT])
        turns.append(one)
    return turns


def asked() -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked,
        prompt=prompts(),
        max_tokens=st.integers(0, 30),
        arrival=st.integers(0, 20),
        abort=st.one_of(st.none(), st.none(), st.integers(0, 30)),
        n=st.integers(1, 4),
        child_abort=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 25))),
        is_beam_search=st.booleans(),
        salt=st.sampled_from([None, None, None, "a"]),
        length_penalty=st.sampled_from([1.0, 0.0, 2.0, -0.5]),
        early_stopping=st.sampled_from([False, True, "never"]),
        follows=st.one_of(
            st.none(), st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(1, MAX_TURN))
        ),
        failure=st.one_of(st.none(), st.none(), st.integers(0, 40)),
        resumed=st.one_of(
            st.just(()), st.lists(st.integers(1, 30), min_size=4, max_size=4).map(tuple)
        ),
        is_scored=st.booleans(),
        priority=st.integers(-2, 2),
        pooling=st.sampled_from([None, None, None, "last", "mean"]),
    ).map(only_an_embedding)


def only_an_embedding(one: Asked) -> Asked:
    """Nothing is drawn for a request that wants one."""
    if one.pooling is None:
        return one
    return one._replace(max_tokens=0, n=1, is_beam_search=False, resumed=(), is_scored=False)


def num_resumed(one: Asked, index: int) -> int:
    """Tokens that a child of the request has when it is added: all children have some, or none has."""
    if not one.resumed or one.is_beam_search or one.max_tokens <= 1:
        return 0
    most = one.max_tokens if index else one.max_tokens - 1  # one child at least goes on
    return min(one.resumed[index], most)


def add(b: Any, request_id: str, one: Asked, expected: Expected) -> None:
    if one.pooling is not None:
        b.embed(request_id, one.prompt, one.pooling, one.salt)
        return
    if one.is_beam_search:
        b.add(
            request_id,
            one.prompt,
            one.max_tokens,
            one.salt,
            priority=one.priority,
            arrival_time=one.arrival,
            n=one.n,
            use_beam_search=True,
            length_penalty=one.length_penalty,
            early_stopping=one.early_stopping,
        )
        return
    resume = []
    for index in range(one.n if num_resumed(one, 0) else 0):
        count = num_resumed(one, index)
        output = tuple(expected(one.prompt, count, index))
        resume.append(ResumedSequence(output, is_finished=count == one.max_tokens))
    scored = 0 if one.is_scored else None
    b.add(
        request_id,
        one.prompt,
        one.max_tokens,
        one.salt,
        tuple(resume),
        one.priority,
        one.arrival,
        n=one.n,
        prompt_logprobs=scored,
    )


def step_with_failures(b: Any, request_ids: set[str]) -> None:
    """One step; rows of these requests are not finite, and what nobody else sees of them is rubbish."""
    table, size = b.scheduler._table, b.memory.block_size
    running = {s.seq_id: s for s in table.running if s.request.request_id in request_ids}
    b.executor.bad_seq_ids = set(running)
    b.step()
    b.executor.bad_seq_ids = set()
    for row in b.plans[-1].rows:
        if row.seq_id not in running:
            continue
        sequence = running[row.seq_id]
        has_result = row.num_samples or row.num_candidates or row.num_scored
        if sequence.request.new.pooling is not None:
            has_result = row.start + row.num_tokens == sequence.num_prompt_tokens
        if not has_result:
            continue
        assert (sequence.request.request_id, sequence.index) in b.failed
        for group, table in enumerate(row.block_tables):
            names = [in_group(name, group) for name in sequence.chain.hashes]
            spoil(b, table, names, first_block(row.start, b.memory.windows[group], size))


def spoil(b: Any, table: Sequence[int], names: Sequence[bytes], first: int) -> None:
    """Put rubbish where blocks of a failed sequence are that nobody holds, here and in the host tier."""
    size, host = b.memory.block_size, b.memory.cache.host
    for index, block_id in enumerate(table):
        if index >= first and not b.memory.pool.ref_counts[block_id]:
            slots = range(block_id * size, (block_id + 1) * size)
            b.executor.slots.update((slot, NOT_FINITE) for slot in slots)
        if index >= len(names):
            continue
        gone = b.memory.cache.index.find(names[index])
        assert gone is None or index >= first
        host_id = host._by_name.get(names[index])
        if host_id is not None and host_id not in host._holds:
            b.executor.host[host_id] = dict.fromkeys(range(size), NOT_FINITE)


def run(b: Any, requests: Sequence[Asked], resets: set[int], expected: Expected) -> None:
    for step in range(6000):
        if step in resets:
            b.memory.reset_prefix_cache()
            b.scheduler.check()
        for i, one in enumerate(requests):
            if one.arrival == step:
                add(b, str(i), one, expected)
            if one.abort == step and one.arrival <= step:
                b.scheduler.abort(str(i))
                b.scheduler.check()
            if one.child_abort is not None and not one.is_beam_search:
                child, at = one.child_abort
                if at == step and one.arrival <= step:
                    b.scheduler.abort_sequence(str(i), child % one.n)
                    b.scheduler.check()
        if b.scheduler.has_work:
            step_with_failures(b, {str(i) for i, one in enumerate(requests) if one.failure == step})
        elif step > max(one.arrival for one in requests):
            return
    raise AssertionError("the work never ends")


def verify(
    b: Any, requests: Sequence[Asked], expected: Expected, beams: Any, embedding: Any
) -> None:
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
            whole = expected(one.prompt, one.max_tokens, index)[num_resumed(one, index) :]
            got = b.children.get((str(i), index), [])
            assert got == whole[: len(got)]
            if (str(i), index) in b.failed:
                assert one.failure is not None
                continue
            child = one.child_abort
            is_cut = child is not None and child[0] % one.n == index and child[1] >= one.arrival
            if not is_cut and not is_aborted:
                assert got == whole
                assert (str(i), index) in b.children or num_resumed(one, index)
                wanted = embedding(one.prompt, one.pooling) if one.pooling else None
                assert b.embeddings.get(str(i)) == wanted
        _verify_scores(b.scores.get(str(i), []), one, is_whole=bool(b.children.get((str(i), 0))))


def _verify_scores(scores: list[float], one: Asked, *, is_whole: bool) -> None:
    """Each prompt token but the first once, in order, before the first token of output."""
    wanted = [-float(position) for position in range(1, len(one.prompt))] if one.is_scored else []
    assert scores == (wanted if is_whole else wanted[: len(scores)])


def _verify_beams(b: Any, name: str, one: Asked, beams: Any, *, is_aborted: bool) -> None:
    got = [b.children[name, i] for i in range(one.n) if (name, i) in b.children]
    if (name, 0) in b.failed:
        assert one.failure is not None
        assert got == [[]] * one.n
        return
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
    requests=st.lists(asked(), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    windows=st.sampled_from(WINDOWS),
    spare_blocks=st.integers(0, 12),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    max_mixed_prefill_tokens=st.sampled_from([None, 1, 5]),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    enable_prefix_caching=st.booleans(),
    num_host_blocks=st.sampled_from([0, 2, 8, 64]),
    preemption_mode=st.sampled_from(["swap", "recompute", "auto"]),
    swap_rate=st.sampled_from([1.0, 2.5, 100.0]),
    resets=st.sets(st.integers(0, 40), max_size=2),
    policy=st.sampled_from(["fcfs", "priority"]),
    priority_aging_s=st.sampled_from([0.0, 3.0]),
)
@settings(deadline=None)
def test_any_workload_ends_with_the_right_tokens_and_an_empty_pool(
    bench: Any,
    expected: Expected,
    expected_beams: Any,
    expected_embedding: Any,
    requests: list[Asked],
    block_size: int,
    windows: Windows,
    spare_blocks: int,
    budget: int,
    max_num_seqs: int,
    max_mixed_prefill_tokens: int | None,
    watermark: float,
    enable_prefix_caching: bool,
    num_host_blocks: int,
    preemption_mode: str,
    swap_rate: float,
    resets: set[int],
    policy: str,
    priority_aging_s: float,
) -> None:
    requests = [one._replace(n=min(one.n, max_num_seqs)) for one in requests]
    requests = [
        one._replace(max_tokens=max(1, one.max_tokens)) if one.is_beam_search else one
        for one in requests
    ]
    requests = conversations(requests, expected)
    demand = BlockDemand(block_size, windows, max(budget, max_num_seqs))
    b = bench(
        num_blocks=max(one.num_blocks(demand) for one in requests) + spare_blocks,
        block_size=block_size,
        windows=windows,
        budget=demand.max_step_tokens,
        max_num_seqs=max_num_seqs,
        max_mixed_prefill_tokens=max_mixed_prefill_tokens,
        watermark=watermark,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        preemption_mode=preemption_mode,
        rates=ExecutorRates(1.0, swap_rate),
        policy=policy,
        priority_aging_s=priority_aging_s,
    )
    run(b, requests, resets, expected)
    verify(b, requests, expected, expected_beams, expected_embedding)


def pressing_workload(random: Random, max_num_seqs: int) -> list[Asked]:
    """More work than a tiny pool holds at once, much of it beginning alike."""
    requests = []
    for _ in range(random.randint(4, 9)):
        trunk = TRUNK[: random.choice((0, 4, 8, 16, 17, 23, 32, 40))]
        suffix = [random.randint(0, 1) for _ in range(random.randint(0, 8))]
        kind = random.choice(("last", "mean")) if random.random() < 0.3 else None
        prompt = trunk + suffix or [1]
        if kind is not None:  # long, so that it is interrupted now and then
            prompt = [*prompt, *(random.randint(0, 1) for _ in range(random.randint(0, 40)))]
        requests.append(
            Asked(
                pooling=kind,
                prompt=prompt,
                max_tokens=random.randint(8, 40),
                arrival=random.randint(0, 6) if random.random() < 0.7 else random.randint(0, 60),
                abort=random.randint(0, 60) if random.random() < 0.1 else None,
                n=random.randint(1, min(4, max_num_seqs)),
                child_abort=(random.randint(0, 3), random.randint(1, 60))
                if random.random() < 0.2
                else None,
                is_beam_search=random.random() < 0.3,
                is_scored=random.random() < 0.3,
                priority=random.randint(0, 3),
                salt="a" if random.random() < 0.1 else None,
                length_penalty=random.choice((1.0, 0.0, 2.0)),
                early_stopping=random.choice((False, True, "never")),
                follows=(random.randint(0, 7), random.randint(0, 3), random.randint(1, MAX_TURN))
                if random.random() < 0.5
                else None,
                failure=random.randint(0, 60) if random.random() < 0.1 else None,
                resumed=tuple(random.randint(1, 20) for _ in range(4))
                if random.random() < 0.1
                else (),
            )
        )
    return [only_an_embedding(one) for one in requests]


@given(seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_a_pool_under_pressure_preempts_and_swaps_and_loses_nothing(
    bench: Any, expected: Expected, expected_beams: Any, expected_embedding: Any, seed: int
) -> None:
    random = Random(seed)
    max_num_seqs = random.randint(2, 8)
    block_size = random.choice((1, 2, 4, 5, 8, 16))
    requests = conversations(pressing_workload(random, max_num_seqs), expected)
    windows = random.choice(WINDOWS)
    demand = BlockDemand(block_size, windows, random.randint(max_num_seqs, 48))
    least = max(one.num_blocks(demand) for one in requests)
    b = bench(
        num_blocks=least + random.randint(0, least // 4),
        block_size=block_size,
        windows=windows,
        budget=demand.max_step_tokens,
        max_num_seqs=max_num_seqs,
        max_mixed_prefill_tokens=random.choice((None, 1, 3, 8)),
        watermark=random.choice((0.0, 0.0, 0.05)),
        enable_prefix_caching=random.random() < 0.7,
        num_host_blocks=random.choice((0, 4, 16, 400)),
        preemption_mode=random.choice(("swap", "swap", "recompute", "auto")),
        rates=ExecutorRates(1.0, random.choice((1.0, 2.5, 100.0))),
        policy=random.choice(("fcfs", "priority")),
        priority_aging_s=random.choice((0.0, 5.0)),
    )
    run(b, requests, {random.randint(0, 60)} if random.random() < 0.2 else set(), expected)
    verify(b, requests, expected, expected_beams, expected_embedding)
