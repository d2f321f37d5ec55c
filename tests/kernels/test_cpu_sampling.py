"""Native sampling: the oracle's token, whatever the filters, in any company."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import cpu_build, cpu_structs
from octavo.kernels.ops import SamplingTensors
from octavo.kernels.reference import ReferenceOps

pytestmark = pytest.mark.native

VOCAB_SIZE = 49_152


class NativeSampler:
    """``Ops.sample`` by the native library."""

    def __init__(self, library: ctypes.CDLL, num_threads: int = 2) -> None:
        self._library = library
        self._num_threads = num_threads

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        out = torch.full((len(logits),), -1)
        num_rows = torch.tensor(len(logits))
        assert logits.stride(1) == 1
        assert all(values.is_contiguous() for values in params)
        args = cpu_structs.SampleArgs(
            num_rows=num_rows.data_ptr(),
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            vocab_size=logits.shape[1],
            **{name: values.data_ptr() for name, values in params._asdict().items()},
            out=out.data_ptr(),
        )
        cpu_structs.run(self._library, [args], self._num_threads)
        return out


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    native = cpu_build.load_library()
    assert native.library is not None, native.detail
    return cpu_structs.declare(native.library)


@pytest.fixture(scope="module")
def native(library: ctypes.CDLL) -> NativeSampler:
    return NativeSampler(library)


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


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Tensor, SamplingTensors]:
    vocab_sizes = [1, 2, 11, 16, 255, 256, 257, 300, 1000, 5003]
    num_rows, vocab_size = draw(st.integers(1, 6)), draw(st.sampled_from(vocab_sizes))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.normal(0, draw(st.sampled_from([0.0, 0.1, 3.0, 20.0])), (num_rows, vocab_size))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    if draw(st.booleans()):
        forbidden = random.random(logits.shape) < draw(st.sampled_from([0.1, 0.99]))
        forbidden[:, random.integers(vocab_size)] = False
        logits[forbidden] = -np.inf
    params = _params(
        num_rows,
        temperature=random.choice([0.0, 0.01, 0.3, 1.0, 2.0], num_rows),
        top_k=random.choice([0, 1, 5, 600, vocab_size - 1, vocab_size, 2 * vocab_size], num_rows),
        top_p=random.choice([1.0, 0.999, 0.9, 0.31, 1e-6], num_rows),
        min_p=random.choice([0.0, 0.1, 1.0], num_rows),
        seed=random.integers(-(2**62), 2**62, num_rows),
        position=random.integers(0, 10_000, num_rows),
    )
    return torch.from_numpy(logits.astype(np.float32)), params


@given(_cases())
@settings(max_examples=300, deadline=None)
def test_equals_the_oracle(library: ctypes.CDLL, case: tuple[Tensor, SamplingTensors]) -> None:
    logits, params = case
    expected = ReferenceOps().sample(logits, params).tolist()
    assert NativeSampler(library).sample(logits, params).tolist() == expected
    alone = NativeSampler(library, num_threads=1)
    for row, token in enumerate(expected):
        own = SamplingTensors(*(values[row : row + 1] for values in params))
        assert alone.sample(logits[row : row + 1], own).tolist() == [token]


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 10.0])
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.6},
        {"min_p": 0.05},
        {"top_k": 50},
        {"top_k": 20_000},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"top_p": 0.9999},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    ],
    ids=str,
)
def test_a_large_vocabulary(native: Any, filters: dict[str, float], spread: float) -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(12, VOCAB_SIZE, generator=random) * spread
    params = _params(12, seed=torch.arange(12), position=torch.arange(12) * 7, **filters)
    expected = ReferenceOps().sample(logits, params).tolist()
    assert native.sample(logits, params).tolist() == expected


def test_greedy_takes_the_lowest_id_on_a_tie(native: Any) -> None:
    logits = torch.zeros(4, 1000)
    logits[0, [17, 16, 900, 33]] = 7.0
    logits[1] = -torch.inf
    logits[2, [999, 998]] = 1e-30
    logits[3, 5:] = -0.0
    assert native.sample(logits, _params(4, temperature=0.0)).tolist() == [16, -1, 998, 0]


def test_top_k_one_is_greedy_even_on_ties(native: Any) -> None:
    logits = torch.zeros(50, 300)
    logits[:, 7] = logits[:, 200] = 3.0
    params = _params(50, top_k=1, seed=torch.arange(50))
    assert set(native.sample(logits, params).tolist()) == {7}


def test_ties_at_the_cut_go_to_the_lower_ids(native: Any) -> None:
    logits = torch.zeros(400, 70)
    logits[:, 1::2] = -0.0
    for values in ({"top_k": 7}, {"top_p": 6.5 / 70}):
        params = _params(400, seed=torch.arange(400), **values)
        assert set(native.sample(logits, params).tolist()) == set(range(7))


def test_forbidden_tokens_are_never_drawn(native: Any) -> None:
    logits = torch.full((200, 9), -torch.inf)
    logits[:, [2, 5]] = 0.0
    for values in ({}, {"top_p": 0.999}, {"top_k": 5}, {"min_p": 0.01}):
        params = _params(200, seed=torch.arange(200), **values)
        assert set(native.sample(logits, params).tolist()) == {2, 5}


def test_frequencies_follow_the_distribution(native: Any) -> None:
    """Chi-square of 4,000 draws with fixed seeds: a number, not a chance."""
    probs = torch.tensor([0.02, 0.3, 0.18, 0.1, 0.05, 0.25, 0.1])
    params = _params(4000, seed=11, position=torch.arange(4000))
    drawn = native.sample(probs.log().expand(4000, 7).contiguous(), params)
    counts = torch.bincount(drawn, minlength=7)
    chi_square = float(((counts - 4000 * probs) ** 2 / (4000 * probs)).sum())
    assert chi_square < 22.5  # 99.9th percentile at 6 degrees of freedom


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [slice(None), slice(40, None), slice(7, 8)])
@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_broken_row_yields_no_token_and_leaves_others_alone(
    native: Any, filters: dict[str, float], where: slice, bad: float
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    params = _params(3, seed=torch.arange(3), **filters)
    expected = native.sample(logits, params).tolist()
    logits[1, where] = bad
    tokens = native.sample(logits, params).tolist()
    assert tokens[::2] == expected[::2]
    is_drawable = bad == -torch.inf and where != slice(None)
    assert (tokens[1] >= 0) == is_drawable


def test_rows_may_be_far_apart(native: Any) -> None:
    wide = torch.randn(5, 900, generator=torch.Generator().manual_seed(4))
    params = _params(5, seed=torch.arange(5), top_k=10)
    strided = native.sample(wide[:, 13:700], params).tolist()
    assert strided == native.sample(wide[:, 13:700].contiguous(), params).tolist()
