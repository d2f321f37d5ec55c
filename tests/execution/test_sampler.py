"""Penalties, bias, masks and log-probabilities, against short numpy rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.engine.api import SamplingParams
from octavo.engine.errors import NOTHING_LEFT
from octavo.engine.execution import logprobs
from octavo.engine.execution.logit_rules import LogitRules, RuledRow, apply_rules
from octavo.engine.execution.logprobs import most_likely, sample_logprobs
from octavo.engine.execution.rows import RowTable
from octavo.engine.execution.sampler import NONFINITE, SampledRow, Sampler
from octavo.engine.execution.transfer import Transfer
from octavo.engine.step import NewRow, StepPlan
from octavo.kernels.torch_ops import TorchOps

VOCAB_SIZE = 24
EOS = 2


def _numpy_rule(
    logits: NDArray[np.float32],
    sampling: SamplingParams,
    prompt: list[int],
    outputs: list[int],
) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    for token in {*prompt, *outputs}:
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in outputs:
        values[token] -= sampling.frequency_penalty
    for token in set(outputs):
        values[token] -= sampling.presence_penalty
    for token, bias in (sampling.logit_bias or {}).items():
        values[token] += bias
    if len(outputs) < sampling.min_tokens:
        values[[EOS, *sampling.stop_token_ids]] = -np.inf
    return values


_TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
_SAMPLING = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.one_of(
        st.none(), st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, 2.5]))
    ),
    min_tokens=st.sampled_from([0, 3, 10]),
    stop_token_ids=st.sampled_from([(), (7, 9)]),
)


@given(
    rows=st.lists(st.tuples(_SAMPLING, _TOKENS, _TOKENS, _TOKENS), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80)
def test_rules_equal_the_numpy_rule(rows: list[tuple[Any, ...]], seed: int) -> None:
    """Some outputs are known at the start (a preemption, a fork), others come one by one."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 4, (len(rows) + 1, VOCAB_SIZE)).astype(np.float32)
    ruled, expected = [], [logits[0].astype(np.float64)]
    for index, (sampling, prompt, early, late) in enumerate(rows, start=1):
        end_ids = frozenset((EOS, *sampling.stop_token_ids))
        early_ids, prompt_ids = (np.array(ids, dtype=np.int32) for ids in (early, prompt))
        rules = LogitRules(sampling, end_ids, prompt_ids, early_ids)
        for token in late:
            rules.append(token)
        ruled.append(RuledRow(index, rules, len(early) + len(late)))
        expected.append(_numpy_rule(logits[index], sampling, prompt, early + late))
    changed = torch.from_numpy(logits.copy())
    apply_rules(changed, ruled)
    np.testing.assert_allclose(changed.numpy(), np.array(expected), rtol=1e-5, atol=1e-5)
    assert np.array_equal(changed[0].numpy(), logits[0])


class _Rows:
    """A row table of sequences that are all at their first sample."""

    def __init__(self, prompts: list[list[int]], samplings: list[SamplingParams]) -> None:
        self.table = RowTable(
            max_num_rows=len(prompts),
            max_model_len=32,
            block_size=4,
            num_blocks=4,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
        )
        news = [
            NewRow(seq_id, prompt, (), sampling, sampling.seed or 0)
            for seq_id, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        self.table.apply(StepPlan(0, new_rows=tuple(news)))
        self.sampler = Sampler(TorchOps(), self.table, Transfer(torch.device("cpu")))

    def sample(self, logits: torch.Tensor, num_samples: int = 1) -> list[Any]:
        rows = [
            SampledRow(seq_id, self.table.place_of(seq_id), num_samples)
            for seq_id in range(len(self.table))
        ]
        return self.sampler.sample(logits, rows)

    def candidates(self, logits: torch.Tensor, counts: list[int]) -> list[Any]:
        """Of every row; where the count is 0, a token is drawn."""
        rows = [
            SampledRow(seq_id, self.table.place_of(seq_id), int(count == 0), count)
            for seq_id, count in enumerate(counts)
        ]
        return self.sampler.sample(logits, rows)


def _logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def test_penalties_see_prompt_and_output_as_they_should() -> None:
    """Repetition covers the prompt; presence and frequency do not."""
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 7] = 3.0
    logits[:, 8] = 2.0
    rows = _Rows(
        [[7, 7]] * 3,
        [
            SamplingParams(presence_penalty=2.0, temperature=0.0),
            SamplingParams(frequency_penalty=2.0, temperature=0.0),
            SamplingParams(repetition_penalty=2.0, temperature=0.0),
        ],
    )
    assert [row.token_ids for row in rows.sample(logits)] == [[7], [7], [8]]


def test_bias_forces_and_forbids() -> None:
    best = int(_logits(1).argmax())
    rows = _Rows(
        [[1], [1]],
        [
            SamplingParams(logit_bias={23: 100.0}, repetition_penalty=2.0, temperature=0.0),
            SamplingParams(logit_bias={best: -100.0}, temperature=0.0),
        ],
    )
    forced, other = rows.sample(_logits(1).repeat(2, 1))
    assert forced.token_ids == [23]
    assert other.token_ids != [best]


def test_min_tokens_keeps_end_ids_away_until_then() -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5, 10**6))
    rows = _Rows([[1]], [sampling])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS], logits[0, 5], logits[0, 9] = 9.0, 8.0, 7.0
    drawn = []
    for _ in range(3):
        token = rows.sample(logits.clone())[0].token_ids[0]
        rows.table.append(rows.table.place_of(0), [token])
        drawn.append(token)
    assert drawn == [9, 9, EOS]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_seed_works_and_wraps_for_children(seed: int) -> None:
    rows = _Rows([[1]], [SamplingParams(temperature=1.5, seed=seed)])
    first = rows.sample(_logits(1), num_samples=8)[0].token_ids
    assert rows.sample(_logits(1), num_samples=8)[0].token_ids == first
    assert len(set(first)) > 1


def test_a_sample_does_not_depend_on_the_batch() -> None:
    samplings = [
        SamplingParams(temperature=t, seed=s, top_p=p)
        for t, s, p in [(0.0, 1, 1.0), (1.0, 2, 1.0), (0.7, 3, 0.8), (2.0, 4, 1.0)]
    ]
    prompts = [[1], [2, 3], [4, 5, 6], [7]]
    logits = _logits(4)
    together = [row.token_ids for row in _Rows(prompts, samplings).sample(logits.clone())]
    for index, token_ids in enumerate(together):
        alone = _Rows([prompts[index]], [samplings[index]])
        assert alone.sample(logits[index : index + 1].clone())[0].token_ids == token_ids


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_logits_end_their_own_row(bad: float) -> None:
    samplings = [SamplingParams(temperature=1.0, seed=s, top_p=0.9, logprobs=1) for s in range(4)]
    healthy = _Rows([[1]] * 4, samplings).sample(_logits(4))
    logits = _logits(4)
    logits[1, 5] = bad
    logits[3] = -torch.inf
    results = _Rows([[1]] * 4, samplings).sample(logits)
    for index in (1, 3):
        assert results[index].error == NONFINITE
        assert results[index].token_ids == ()
        assert results[index].logprobs is None
    assert (results[0], results[2]) == (healthy[0], healthy[2])


def test_a_single_forbidden_token_is_not_an_error() -> None:
    logits = _logits(1)
    logits[0, 3] = -torch.inf
    assert _Rows([[1]], [SamplingParams()]).sample(logits)[0].error is None


def test_logprobs_are_those_of_the_model() -> None:
    """Before bias, temperature and filters: what the model said, not what was made of it."""
    sampling = SamplingParams(temperature=0.0, logprobs=3, logit_bias={11: 100.0})
    raw = _logits(1)
    (result,) = _Rows([[1]], [sampling]).sample(raw.clone())
    assert result.token_ids == [11]
    expected = torch.log_softmax(raw[0].double(), dim=-1)
    (reported,) = result.logprobs
    assert reported.logprob == pytest.approx(float(expected[11]), abs=1e-5)
    assert reported.rank == 1 + int((expected > expected[11]).sum())
    order = expected.argsort(descending=True)[:3]
    assert [token for token, _ in reported.top] == order.tolist()
    assert [value for _, value in reported.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


@pytest.mark.parametrize(("asked", "given_"), [(0, 0), (5, 5), (-1, VOCAB_SIZE), (99, VOCAB_SIZE)])
def test_number_of_alternatives(asked: int, given_: int) -> None:
    (reported,) = sample_logprobs(_logits(1), [[1, 2]], [asked])
    assert [len(one.top) for one in reported] == [given_, given_]


def test_many_rows_report_as_each_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different numbers of tokens and alternatives, in more rows than are ranked at once."""
    monkeypatch.setattr(logprobs, "MAX_TOKENS_AT_ONCE", 3)
    values = torch.log_softmax(_logits(6), dim=-1)
    token_ids = [[4], [1, 2, 3], [], [0], [23, 23], [9]]
    num_top = [0, 2, 1, -1, 0, 2]
    together = sample_logprobs(values, token_ids, num_top)
    assert [len(reported) for reported in together] == [1, 3, 0, 1, 2, 1]
    for row, reported in enumerate(together):
        alone = sample_logprobs(values[row : row + 1], [token_ids[row]], [num_top[row]])
        assert alone == [reported]
        for token_id, one in zip(token_ids[row], reported, strict=True):
            assert one.logprob == float(values[row, token_id])
            assert one.rank == 1 + int((values[row] > values[row, token_id]).sum())
            order = values[row].sort(descending=True, stable=True).indices.tolist()
            count = VOCAB_SIZE if num_top[row] < 0 else num_top[row]
            assert [token for token, _ in one.top] == order[:count]


def test_best_of_reports_only_what_ranking_needs() -> None:
    """Every token's own log-probability, no alternatives, nothing for a row that did not ask."""
    best_of = SamplingParams(n=1, best_of=3, temperature=1.0, top_p=0.5, presence_penalty=1.0)
    raw = _logits(3)
    rows = _Rows([[1], [2], [3]], [best_of, SamplingParams(temperature=1.0), best_of])
    results = rows.sample(raw.clone(), num_samples=3)
    assert results[1].logprobs is None
    for index in (0, 2):
        expected = torch.log_softmax(raw[index], dim=-1)
        assert len(results[index].logprobs) == 3
        for token_id, one in zip(results[index].token_ids, results[index].logprobs, strict=True):
            assert one.logprob == pytest.approx(float(expected[token_id]), abs=1e-6)
            assert one.top == ()


@given(values=st.lists(st.integers(-2, 2), min_size=1, max_size=20), count=st.integers(1, 20))
def test_the_most_likely_in_order(values: list[int], count: int) -> None:
    count = min(count, len(values))
    row = torch.tensor([values, values[::-1]], dtype=torch.float32)
    row[row == -2] = -torch.inf
    found, ids = most_likely(row, count)
    expected = row.sort(dim=-1, descending=True, stable=True)
    assert ids.tolist() == expected.indices[:, :count].tolist()
    assert found.tolist() == expected.values[:, :count].tolist()


_RULED = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=-0.3),
    SamplingParams(logit_bias={3: 4.0, 5: -100.0}),
    SamplingParams(min_tokens=4, stop_token_ids=(7,)),
    SamplingParams(repetition_penalty=0.5, min_tokens=4, logit_bias={2: 50.0, 8: 2.0}),
]


@pytest.mark.parametrize("count", [1, 6, VOCAB_SIZE, 10**6])
def test_candidates_have_the_rules_applied_to_log_probabilities(count: int) -> None:
    """As in transformers: log_softmax first, so that penalties work on negative numbers only."""
    outputs = [5, 9, 5]
    rows = _Rows([[4, 4, 1]] * len(_RULED), _RULED)
    for place in range(len(_RULED)):
        rows.table.append(rows.table.place_of(place), outputs)
    raw = _logits(len(_RULED)) * 4
    results = rows.candidates(raw.clone(), [count] * len(_RULED))
    for logits, sampling, result in zip(raw, _RULED, results, strict=True):
        logprobs_ = torch.log_softmax(logits, dim=-1).numpy()
        expected = _numpy_rule(logprobs_, sampling, [4, 4, 1], outputs)
        order = np.argsort(-expected, kind="stable")[:count]
        order = order[np.isfinite(expected[order])]
        assert [token for token, _ in result.candidates] == order.tolist()
        assert [value for _, value in result.candidates] == pytest.approx(expected[order], abs=1e-4)
        assert result.token_ids == ()
    num_masked = len({EOS, *_RULED[3].stop_token_ids})
    assert len(results[3].candidates) == min(count, VOCAB_SIZE - num_masked)


def test_candidates_do_not_depend_on_the_batch() -> None:
    samplings = [*_RULED, SamplingParams(temperature=1.0, seed=3, logprobs=2)]
    counts = [3, 5, 3, 8, 5, 0]
    logits = _logits(6)
    together = _Rows([[1]] * 6, samplings).candidates(logits.clone(), counts)
    assert together[5].candidates is None
    assert len(together[5].token_ids) == 1
    for index, sampling in enumerate(samplings):
        alone = _Rows([[1]], [sampling])
        (result,) = alone.candidates(logits[index : index + 1].clone(), [counts[index]])
        assert result._replace(seq_id=index) == together[index]


def test_a_row_without_candidates_ends_alone() -> None:
    sampling = SamplingParams(min_tokens=1)
    logits = _logits(3)
    healthy = _Rows([[1]], [sampling]).candidates(logits[2:].clone(), [4])[0]
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[1, EOS] = 1.0  # the only one, and min_tokens forbids it
    results = _Rows([[1]] * 3, [sampling] * 3).candidates(logits, [4] * 3)
    assert [row.error for row in results] == [NONFINITE, NOTHING_LEFT, None]
    assert [row.candidates for row in results[:2]] == [None, None]
    assert results[2].candidates == healthy.candidates
