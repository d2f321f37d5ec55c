"""Ops.sample: both op sets against a short numpy rule, and its promises one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels import sync_free_sampling, torch_sampling
from octavo.kernels.ops import Ops, SamplingSummary, SamplingTensors
from octavo.kernels.philox import philox_uniform
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_ops import TorchOps


def _params(num_rows: int, **values: Any) -> SamplingTensors:
    columns = {
        "temperature": torch.float32,
        "top_k": torch.int64,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "seed": torch.int64,
        "position": torch.int64,
    }
    neutral = {"temperature": 1.0, "top_p": 1.0}
    tensors = {}
    for name, dtype in columns.items():
        value = torch.as_tensor(values.get(name, neutral.get(name, 0)), dtype=dtype)
        tensors[name] = value.expand(num_rows).contiguous()
    return SamplingTensors(**tensors)


def _numpy_rule(logits: NDArray[np.float32], params: SamplingTensors, row: int) -> int:
    temperature, top_k, top_p, min_p = (float(values[row]) for values in params[:4])
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return int(order[0])
    probs = np.exp((logits.astype(np.float64) - logits.max()) / temperature)[order]
    if top_k:
        probs[int(top_k) :] = 0
    if top_p < 1:
        probs[np.cumsum(probs) - probs >= top_p * probs.sum()] = 0
    probs[probs < min_p * probs[0]] = 0
    by_id = np.zeros_like(probs)
    by_id[order] = probs
    uniform = float(philox_uniform(params.seed[row : row + 1], params.position[row : row + 1]))
    return int(np.searchsorted(np.cumsum(by_id), uniform * by_id.sum(), side="right"))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Tensor, SamplingTensors]:
    num_rows, vocab_size = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 11, 300, 1000]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.normal(0, draw(st.sampled_from([0.1, 3.0])), (num_rows, vocab_size))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    params = _params(
        num_rows,
        temperature=random.choice([0.0, 0.3, 1.0, 2.0], num_rows),
        top_k=random.choice([0, 1, 5, vocab_size, 2 * vocab_size], num_rows),
        top_p=random.choice([1.0, 0.9, 0.31, 1e-6], num_rows),
        min_p=random.choice([0.0, 0.1, 1.0], num_rows),
        seed=random.integers(-(2**62), 2**62, num_rows),
        position=random.integers(0, 10_000, num_rows),
    )
    return torch.from_numpy(logits.astype(np.float32)), params


@given(_cases())
@settings(max_examples=150)
def test_equals_the_numpy_rule(case: tuple[Tensor, SamplingTensors]) -> None:
    logits, params = case
    expected = [_numpy_rule(logits[row].numpy(), params, row) for row in range(len(logits))]
    assert ReferenceOps().sample(logits.clone(), params).tolist() == expected
    assert TorchOps().sample(logits.clone(), params).tolist() == expected
    assert sync_free_sampling.sample(logits.clone(), params, None).tolist() == expected
    summary = SamplingSummary(
        has_random=bool((params.temperature > 0).any()),
        has_top_k=bool((params.top_k > 0).any()),
        has_top_p=bool((params.top_p < 1).any()),
        has_min_p=bool((params.min_p > 0).any()),
    )
    assert sync_free_sampling.sample(logits.clone(), params, summary).tolist() == expected


def test_greedy_takes_the_lowest_id_on_a_tie(ops: Ops) -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert ops.sample(logits, _params(2, temperature=0.0)).tolist() == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str
)
def test_rows_that_cannot_be_drawn_from_give_no_token(
    ops: Ops, filters: dict[str, float], bad: float
) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    params = _params(4, seed=torch.arange(4), **filters)
    expected = ops.sample(logits.clone(), params).tolist()
    logits[1] = bad
    logits[2, 7] = bad
    one_bad = [expected[2] if bad == -torch.inf and expected[2] != 7 else -1]
    wanted = [expected[0], -1, *one_bad, expected[3]]
    for sample in (ops.sample, partial(sync_free_sampling.sample, summary=None)):
        assert sample(logits.clone(), params).tolist() == wanted


def test_top_k_one_is_greedy_even_on_ties(ops: Ops) -> None:
    logits = torch.zeros(50, 300)
    logits[:, 7] = logits[:, 200] = 3.0
    params = _params(50, top_k=1, seed=torch.arange(50))
    assert set(ops.sample(logits, params).tolist()) == {7}


def test_a_top_k_of_the_vocabulary_or_more_is_off(ops: Ops) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)).expand(30, 40)
    seeds = torch.arange(30)
    free = ops.sample(logits, _params(30, seed=seeds)).tolist()
    for top_k in (40, 41, 9_999_999):
        assert ops.sample(logits, _params(30, seed=seeds, top_k=top_k)).tolist() == free


def test_filters_leave_what_they_should(ops: Ops) -> None:
    probs = torch.tensor([0.4, 0.1, 0.3, 0.15, 0.05])
    logits = probs.log().expand(400, 5)
    seeds = torch.arange(400)

    def drawn(**values: Any) -> set[int]:
        return set(ops.sample(logits, _params(400, seed=seeds, **values)).tolist())

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 2}
    assert drawn(top_p=0.69) == {0, 2}
    assert drawn(top_p=0.71) == {0, 2, 3}
    assert drawn(min_p=0.3) == {0, 2, 3}
    # top-p counts within what top-k leaves: 0.4 / 0.85 is below 0.5, 0.7 / 0.85 is not.
    assert drawn(top_k=3, top_p=0.5) == {0, 2}
    assert drawn(top_k=3, top_p=0.4) == {0}


def test_frequencies_follow_the_distribution(ops: Ops) -> None:
    """Chi-square of 4,000 draws with fixed seeds: a number, not a chance."""
    probs = torch.tensor([0.02, 0.3, 0.18, 0.1, 0.05, 0.25, 0.1])
    params = _params(4000, seed=11, position=torch.arange(4000))
    drawn = ops.sample(probs.log().expand(4000, 7), params)
    counts = torch.bincount(drawn, minlength=7)
    chi_square = float(((counts - 4000 * probs) ** 2 / (4000 * probs)).sum())
    assert chi_square < 22.5  # 99.9th percentile at 6 degrees of freedom


def test_a_row_does_not_depend_on_its_neighbours(ops: Ops) -> None:
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(70, 600, generator=random)
    params = _params(
        70,
        temperature=torch.tensor([0.0, 0.7] * 35),
        top_p=torch.tensor([0.9, 1.0, 0.5, 1.0, 1.0] * 14),
        top_k=torch.tensor([0, 3, 0, 0, 50, 0, 0] * 10),
        seed=torch.arange(70),
        position=torch.arange(70) * 3,
    )
    together = ops.sample(logits, params).tolist()
    alone = [
        ops.sample(logits[i : i + 1], SamplingTensors(*(v[i : i + 1] for v in params))).item()
        for i in range(70)
    ]
    assert together == alone


def test_forbidden_tokens_are_never_drawn(ops: Ops) -> None:
    logits = torch.full((200, 9), -torch.inf)
    logits[:, [2, 5]] = 0.0
    for values in ({}, {"top_p": 0.999}, {"top_k": 5}, {"min_p": 0.01}):
        params = _params(200, seed=torch.arange(200), **values)
        assert set(ops.sample(logits, params).tolist()) == {2, 5}


@pytest.mark.parametrize("top_p", [0.01, 0.05, 0.75])
def test_a_flat_distribution_looks_beyond_the_first_candidates(top_p: float) -> None:
    """The nucleus is settled by the first candidates, by more of them, or by the whole vocabulary."""
    vocab_size = 40 * torch_sampling.MIN_CANDIDATES
    logits = torch.zeros(24, vocab_size)
    params = _params(24, top_p=top_p, seed=torch.arange(24))
    drawn = TorchOps().sample(logits, params)
    assert drawn.tolist() == ReferenceOps().sample(logits, params).tolist()
    assert top_p * vocab_size / 2 < int(drawn.max()) < top_p * vocab_size


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_cpu() -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
    params = _params(40, top_p=torch.tensor([0.9, 1.0] * 20), seed=torch.arange(40))
    on_gpu = SamplingTensors(*(value.cuda() for value in params))
    drawn = TorchOps().sample(logits.cuda(), on_gpu)
    assert drawn.tolist() == ReferenceOps().sample(logits, params).tolist()


def test_the_likeliest_is_what_temperature_0_draws(ops: Ops) -> None:
    random = torch.Generator().manual_seed(4)
    weight, x = torch.randn((50, 16), generator=random), torch.randn((9, 16), generator=random)
    weight[7] = weight[3]
    x[2] = 9 * weight[3]  # the first of two equals
    x[4, 0] = float("nan")
    head = ops.pack_head(weight)
    expected = ops.sample(ops.logits(x, head), _params(9, temperature=0.0))
    assert torch.equal(ops.likeliest(x, head), expected)
    assert expected[[2, 4]].tolist() == [3, -1]
