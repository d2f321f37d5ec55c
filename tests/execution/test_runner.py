"""What plans mean: every way of computing a sequence gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.engine.api import SamplingParams
from octavo.engine.execution.errors import ExecutionError
from octavo.engine.execution.sampler import NONFINITE
from octavo.engine.step import BlockCopy, BlockSwap, Fork, StepPlan
from octavo.kernels.torch_sampling import likeliest
from tests.execution.conftest import FakeModel

PROMPT = [3, 14, 15, 9, 26, 5, 3, 5, 8]
POISON = 31


@pytest.fixture
def expected(make_driver: Any) -> list[int]:
    """Greedy tokens of a sequence alone, prefilled at once."""
    tokens: list[int] = make_driver().generate(0, PROMPT, 8)
    assert len(set(tokens)) > 1  # the fake says something
    return tokens


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_size_does_not_matter(make_driver: Any, expected: list[int], block_size: int) -> None:
    assert make_driver(block_size=block_size).generate(0, PROMPT, 8) == expected


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunked_prefill(make_driver: Any, expected: list[int], chunk: int) -> None:
    driver = make_driver()
    new_rows: tuple[Any, ...] = (driver.new(0, PROMPT),)
    result: dict[int, Any] = {}
    for start in range(0, len(PROMPT), chunk):
        end = min(start + chunk, len(PROMPT))
        assert result == {}  # no sample in mid-prefill
        row = driver.row(0, start, end - start, num_samples=int(end == len(PROMPT)))
        result = driver.step([row], new_rows=new_rows)
        new_rows = ()
    assert result[0].token_ids == expected[:1]


def test_rows_share_a_step(make_driver: Any, expected: list[int]) -> None:
    """A prefill beside decodes, results in the plan's order whatever the order of computing."""
    driver = make_driver()
    other = driver.generate(1, [7, 7, 1], 3)
    driver.generate(2, [30, 1], 1)
    rows = [driver.row(0, 0, len(PROMPT)), driver.row(1, 5, 1), driver.row(2, 2, 1)]
    result = driver.step(rows, new_rows=(driver.new(0, PROMPT),))
    assert list(result) == [0, 1, 2]
    assert result[0].token_ids == expected[:1]
    alone = make_driver()
    assert alone.generate(1, [7, 7, 1], 4) == [*other, *result[1].token_ids]


def test_only_sampled_rows_get_logits(make_driver: Any, fake_model: Any) -> None:
    asked: list[int] = []
    logits = fake_model.logits

    def spy(hidden: Any) -> Any:
        asked.append(len(hidden))
        return logits(hidden)

    fake_model.logits = spy
    driver = make_driver(model=fake_model)
    rows = [driver.row(0, 0, 4, num_samples=0), driver.row(1, 0, 2)]
    driver.step(rows, new_rows=(driver.new(0, PROMPT), driver.new(1, [4, 4])))
    driver.step([driver.row(0, 4, 1, num_samples=0)])
    assert asked == [1]
    assert fake_model.num_tokens_seen == [6, 1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_preempted_and_back(make_driver: Any, temperature: float) -> None:
    """Removed, its blocks used by another, computed anew: no token changes, sampled or not."""
    options = {"temperature": temperature, "seed": 5, "frequency_penalty": 0.4}
    expected = make_driver().generate(0, PROMPT, 8, **options)
    driver = make_driver(num_blocks=8)
    outputs = driver.generate(0, PROMPT, 3, **options)
    driver.remove(0)
    driver.generate(1, [30] * 20, 3)
    driver.remove(1)
    new = driver.new(0, PROMPT, outputs, **options)
    known = len(PROMPT) + len(outputs)
    outputs += driver.step([driver.row(0, 0, known)], new_rows=(new,))[0].token_ids
    while len(outputs) < 8:
        start = len(PROMPT) + len(outputs) - 1
        outputs += driver.step([driver.row(0, start, 1)])[0].token_ids
    assert outputs == expected


def test_removed_and_added_in_one_plan(make_driver: Any, expected: list[int]) -> None:
    driver = make_driver()
    driver.generate(0, [5, 5, 5], 2)
    driver.tables.pop(0)
    result = driver.step(
        [driver.row(0, 0, len(PROMPT))], removed_seq_ids=(0,), new_rows=(driver.new(0, PROMPT),)
    )
    assert result[0].token_ids == expected[:1]


def test_samples_of_one_row_use_one_seed_each(make_driver: Any) -> None:
    driver = make_driver()
    new = driver.new(0, PROMPT, temperature=2.0, seed=100)
    together = driver.step([driver.row(0, 0, len(PROMPT), num_samples=6)], new_rows=(new,))
    alone = [
        make_driver().generate(0, PROMPT, 1, temperature=2.0, seed=100 + j)[0] for j in range(6)
    ]
    assert together[0].token_ids == alone
    assert len(set(alone)) > 1


def test_forks_continue_as_if_they_had_been_alone(make_driver: Any) -> None:
    """Parent and children share the prompt; the half-full block is copied before they write."""
    options = {"temperature": 1.5, "frequency_penalty": 0.5}
    driver = make_driver(max_num_seqs=2)  # the table of rows grows
    new = driver.new(0, PROMPT, seed=7, **options)
    result = driver.step([driver.row(0, 0, len(PROMPT), num_samples=3)], new_rows=(new,))
    outputs = {seq_id: [token] for seq_id, token in enumerate(result[0].token_ids)}
    half_full = driver.tables[0][-1]
    copies, forks = [], []
    for child in (1, 2):
        driver.tables[child] = [*driver.tables[0][:-1], driver.free.pop()]
        copies.append(BlockCopy(0, half_full, driver.tables[child][-1]))
        forks.append(Fork(0, child, len(PROMPT), seed=7 + child))
    rows = [
        driver.row(
            seq_id,
            len(PROMPT),
            1,
            first_changed_block=2,
            appended_token_ids=outputs[seq_id] if seq_id else (),
        )
        for seq_id in range(3)
    ]
    fields: dict[str, Any] = {"forks": tuple(forks), "block_copies": tuple(copies)}
    for start in range(len(PROMPT) + 1, len(PROMPT) + 6):
        for seq_id, row in driver.step(rows, **fields).items():
            outputs[seq_id] += row.token_ids
        rows = [driver.row(seq_id, start, 1) for seq_id in range(3)]
        fields = {}
    for seq_id in range(3):
        alone = make_driver().generate(0, PROMPT, 6, seed=7 + seq_id, **options)
        assert outputs[seq_id] == alone


def test_a_fork_outlives_its_parent(make_driver: Any, expected: list[int]) -> None:
    driver = make_driver()
    driver.generate(0, PROMPT, 2)
    driver.tables[1] = driver.tables.pop(0)
    row = driver.row(1, len(PROMPT) + 1, 1)
    fork = Fork(0, 1, len(PROMPT) + 2, seed=0)
    result = driver.step([row], forks=(fork,), removed_seq_ids=(0,))
    assert result[1].token_ids == expected[2:3]


def test_appended_tokens_are_computed_like_sampled_ones(
    make_driver: Any, expected: list[int]
) -> None:
    driver = make_driver()
    row = driver.row(0, 0, len(PROMPT), num_samples=0)
    driver.step([row], new_rows=(driver.new(0, PROMPT),))
    row = driver.row(0, len(PROMPT), 3, appended_token_ids=expected[:3])
    assert driver.step([row])[0].token_ids == expected[3:4]


def test_unwritten_tokens_leave_the_shared_block_alone(
    make_driver: Any, expected: list[int]
) -> None:
    """A complete prefix hit computes its last token with slot -1, into nobody's block."""
    driver = make_driver(block_size=3)
    driver.generate(0, PROMPT, 1)
    caches = [tensor.clone() for cache in driver.runner._kv_caches for tensor in cache]
    driver.tables[1] = list(driver.tables[0])
    new = driver.new(1, PROMPT)
    row = driver.row(1, len(PROMPT) - 1, 1, num_unwritten=1, first_changed_block=0)
    result = driver.step([row], new_rows=(new,))
    assert result[1].token_ids == expected[:1]
    after = [tensor for cache in driver.runner._kv_caches for tensor in cache]
    assert all(bool((a == b).all()) for a, b in zip(caches, after, strict=True))


def test_a_block_table_may_change_in_the_middle(make_driver: Any, expected: list[int]) -> None:
    driver = make_driver(block_size=4)
    outputs = driver.generate(0, PROMPT, 2)
    spare = driver.free.pop()
    copy = BlockCopy(0, driver.tables[0][1], spare)
    driver.tables[0][1] = spare
    row = driver.row(0, len(PROMPT) + 1, 1, first_changed_block=1)
    outputs += driver.step([row], block_copies=(copy,))[0].token_ids
    assert outputs == expected[:3]


def test_a_row_without_finite_logits_ends_alone(make_driver: Any, expected: list[int]) -> None:
    driver = make_driver()
    rows = [driver.row(1, 0, 2), driver.row(0, 0, len(PROMPT)), driver.row(2, 0, 3)]
    news = (driver.new(0, PROMPT), driver.new(1, [POISON, 4]), driver.new(2, [1, POISON, 2]))
    result = driver.step(rows, new_rows=news)
    for seq_id in (1, 2):
        assert result[seq_id].error == NONFINITE
        assert result[seq_id].token_ids == ()
    assert result[0].token_ids == expected[:1]
    driver.remove(1, 2)
    # Its blocks hold NaN; who gets them next must not notice.
    outputs = list(result[0].token_ids)
    for start in range(len(PROMPT), len(PROMPT) + 7):
        outputs += driver.step([driver.row(0, start, 1)])[0].token_ids
    assert outputs == expected
    assert make_driver().generate(5, [4], 3) == driver.generate(5, [4], 3)


class NamingModel(FakeModel):
    """Names the most likely tokens without the sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.num_named = 0

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        self.num_named += len(hidden)
        return likeliest(self.logits(hidden))


def test_rows_that_want_the_most_likely_token_alone_need_no_sampler(
    make_driver: Any, expected: list[int]
) -> None:
    model = NamingModel()
    assert make_driver(model=model).generate(0, PROMPT, 8) == expected
    assert model.num_named == 8


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 12},
        {"n": 1, "best_of": 2},
    ],
    ids=lambda sampling: next(reversed(sampling)),
)
def test_other_rows_and_their_company_get_logits(
    make_driver: Any, expected: list[int], sampling: dict[str, Any]
) -> None:
    model = NamingModel()
    driver, plain = make_driver(model=model), make_driver()
    tokens = driver.generate(1, PROMPT, 6, **sampling)
    assert model.num_named == 0
    assert tokens == plain.generate(1, PROMPT, 6, **sampling)
    rows = [driver.row(0, 0, len(PROMPT)), driver.row(1, len(PROMPT) + 5, 1)]
    result = driver.step(rows, new_rows=(driver.new(0, PROMPT),))
    assert list(result[0].token_ids) == expected[:1]
    assert model.num_named == 0
    driver.remove(1)
    assert driver.step([driver.row(0, len(PROMPT), 1)])[0].token_ids == expected[1:2]
    assert model.num_named == 1


def test_several_samples_of_a_row_get_logits(make_driver: Any, expected: list[int]) -> None:
    model = NamingModel()
    driver = make_driver(model=model)
    row = driver.row(0, 0, len(PROMPT), num_samples=3)
    result = driver.step([row], new_rows=(driver.new(0, PROMPT),))
    assert list(result[0].token_ids) == expected[:1] * 3
    assert model.num_named == 0


def test_named_rows_without_finite_logits_end_alone(make_driver: Any, expected: list[int]) -> None:
    model = NamingModel()
    driver = make_driver(model=model)
    rows = [driver.row(1, 0, 2), driver.row(0, 0, len(PROMPT))]
    result = driver.step(rows, new_rows=(driver.new(0, PROMPT), driver.new(1, [POISON, 4])))
    assert model.num_named == 2
    assert (result[1].error, list(result[1].token_ids)) == (NONFINITE, [])
    assert list(result[0].token_ids) == expected[:1]
    assert driver.step([driver.row(0, len(PROMPT), 1)])[0].token_ids == expected[1:2]


def test_a_step_without_rows_applies_removals(make_driver: Any) -> None:
    driver = make_driver()
    driver.generate(0, PROMPT, 1)
    assert driver.step(removed_seq_ids=(0,)) == {}
    with pytest.raises(ExecutionError, match="sequence 0"):
        driver.step(removed_seq_ids=(0,))


def test_a_result_may_be_asked_late_and_twice(make_driver: Any, expected: list[int]) -> None:
    """The next step finishes the one before it, whose samples it needs."""
    driver = make_driver()
    first = driver.runner.submit(
        StepPlan(1, new_rows=(driver.new(0, PROMPT),), rows=(driver.row(0, 0, len(PROMPT)),))
    )
    second = driver.runner.submit(StepPlan(2, rows=(driver.row(0, len(PROMPT), 1),)))
    assert second.result().rows[0].token_ids == expected[1:2]
    assert first.result().rows[0].token_ids == expected[:1]
    assert first.result() is first.result()


def test_warm_up_leaves_no_trace(make_driver: Any, expected: list[int], fake_model: Any) -> None:
    driver = make_driver(model=fake_model)
    driver.runner.warm_up(1000, num_rows=5)
    assert fake_model.num_tokens_seen == [64 + 4]
    driver.runner.warm_up(20)
    assert fake_model.num_tokens_seen[1:] == [20]
    assert len(driver.runner._table) == 0
    assert driver.generate(0, PROMPT, 8) == expected


def test_kernels_are_warmed_by_steps_of_every_kind(
    make_driver: Any, expected: list[int], fake_model: Any
) -> None:
    driver, progress = make_driver(model=fake_model), list[float]()
    driver.runner.warm_up_kernels(48, 4, progress.append)
    assert progress == sorted(progress)
    assert progress[0] == 0.0
    assert 0.9 < progress[-1] < 1.0
    assert {1, 2, 4, 16, 48} <= set(fake_model.num_tokens_seen)  # decodes of 1 and 4 rows, prompts
    assert max(fake_model.num_tokens_seen) == 48
    assert 1 + 16 in fake_model.num_tokens_seen  # a decode beside a prompt
    assert len(driver.runner._table) == 0
    assert driver.generate(0, PROMPT, 8) == expected


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_kernels_are_warmed_in_the_smallest_pool(make_driver: Any, num_blocks: int) -> None:
    driver = make_driver(num_blocks=num_blocks)
    driver.runner.warm_up_kernels(512, 8, lambda _share: None)
    assert len(driver.runner._table) == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_warm_up_fits_the_smallest_pool(make_driver: Any, num_blocks: int) -> None:
    driver = make_driver(num_blocks=num_blocks, block_size=1)
    driver.runner.warm_up(512, num_rows=8)
    assert len(driver.runner._table) == 0


class TestBrokenPlans:
    """A plan that cannot be is an error that names the sequence or block."""

    def test_unknown_sequence(self, make_driver: Any) -> None:
        driver = make_driver()
        with pytest.raises(ExecutionError, match="sequence 9"):
            driver.step([driver.row(9, 0, 1)])

    def test_added_twice(self, make_driver: Any) -> None:
        driver = make_driver()
        driver.generate(0, PROMPT, 1)
        with pytest.raises(ExecutionError, match="sequence 0 is added twice"):
            driver.step([driver.row(0, 0, 1)], new_rows=(driver.new(0, PROMPT),))

    @pytest.mark.parametrize("block_id", [-1, 40, 2**31])
    def test_block_outside_the_pool(self, make_driver: Any, block_id: int) -> None:
        driver = make_driver()
        driver.tables[0] = [block_id]
        row = driver.row(0, 0, 2, first_changed_block=0)
        with pytest.raises(ExecutionError, match="outside the pool of 40"):
            driver.step([row], new_rows=(driver.new(0, [1, 2]),))
        with pytest.raises(ExecutionError, match="outside the pool of 40"):
            driver.step(block_copies=(BlockCopy(0, 0, block_id),))

    @pytest.mark.parametrize("prompt", [[32], [-1], [2**40]])
    def test_token_outside_the_vocabulary(self, make_driver: Any, prompt: list[int]) -> None:
        driver = make_driver()
        with pytest.raises(ExecutionError, match="outside the vocabulary"):
            driver.step([driver.row(0, 0, 1)], new_rows=(driver.new(0, prompt),))

    def test_tokens_that_do_not_exist(self, make_driver: Any) -> None:
        driver = make_driver()
        with pytest.raises(ExecutionError, match="sequence 0 is scheduled from token 0 for 3"):
            driver.step([driver.row(0, 0, 3)], new_rows=(driver.new(0, [1, 2]),))

    def test_too_few_blocks(self, make_driver: Any) -> None:
        driver = make_driver()
        row = driver.row(0, 0, 4)._replace(num_tokens=5)
        with pytest.raises(ExecutionError, match="with 1 blocks"):
            driver.step([row], new_rows=(driver.new(0, PROMPT),))

    @pytest.mark.parametrize("wanted", [{}, {"num_samples": 0, "num_candidates": 4}])
    def test_sample_before_the_last_token(self, make_driver: Any, wanted: Any) -> None:
        driver = make_driver()
        row = driver.row(0, 0, 3, **wanted)
        with pytest.raises(ExecutionError, match="before its last token"):
            driver.step([row], new_rows=(driver.new(0, PROMPT),))

    def test_longer_than_the_window(self, make_driver: Any) -> None:
        driver = make_driver(max_model_len=8)
        with pytest.raises(ExecutionError, match="beyond the model's window"):
            driver.step([driver.row(0, 0, 1)], new_rows=(driver.new(0, [1] * 10),))

    def test_fork_beyond_the_parent(self, make_driver: Any) -> None:
        driver = make_driver()
        driver.generate(0, PROMPT, 1)
        for num_tokens in (len(PROMPT) - 1, len(PROMPT) + 2):
            with pytest.raises(ExecutionError, match="sequence 1 cannot start"):
                driver.step(forks=(Fork(0, 1, num_tokens, 0),))

    def test_what_is_not_offered(self, make_driver: Any) -> None:
        driver = make_driver()
        with pytest.raises(ExecutionError, match="host tier"):
            driver.step(block_swaps=(BlockSwap(0, 1, 1, True),))
        with pytest.raises(ExecutionError, match="1 KV groups, and a block of group 1"):
            driver.step(block_copies=(BlockCopy(1, 0, 1),))
        with pytest.raises(ExecutionError, match="1 KV groups, and a block of group 1"):
            driver.step(block_swaps=(BlockSwap(1, 1, 1, True),))
        row = driver.row(0, 0, 1)
        with pytest.raises(ExecutionError, match="1 KV groups, not 2"):
            driver.step([row._replace(block_tables=([0], [1]))])
        with pytest.raises(ExecutionError, match="samples and candidates"):
            driver.step([row._replace(num_candidates=4)])
        for sampling in (SamplingParams(bad_words=("x",)),):
            new = driver.new(0, PROMPT)._replace(sampling=sampling)
            with pytest.raises(ExecutionError, match="bad words without their tokens"):
                driver.step(new_rows=(new,))
