"""Embeddings in the executor: the same bits in any chunks and company, anew after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from octavo.engine.api import PoolingParams, SamplingParams
from octavo.engine.execution import pooling
from octavo.engine.execution.errors import ExecutionError
from octavo.engine.execution.pooling import Pool
from octavo.engine.step import NewRow

PROMPT = [3, 9, 4, 4, 27, 1, 8, 15, 2, 30, 6]
LAST, MEAN = PoolingParams("last"), PoolingParams("mean")


def pooled(seq_id: int, prompt: Sequence[int], params: PoolingParams) -> NewRow:
    sampling = SamplingParams(max_tokens=0, temperature=0.0)
    return NewRow(seq_id, list(prompt), [], sampling, 0, params)


def embed(
    driver: Any, seq_id: int, prompt: Sequence[int], params: PoolingParams, chunks: Sequence[int]
) -> list[float]:
    """The embedding of a prompt computed in these chunks; nothing comes before the last one."""
    start, results = 0, []
    for count in chunks:
        new = (pooled(seq_id, prompt, params),) if not start else ()
        results.append(driver.step([driver.row(seq_id, start, count, 0)], new_rows=new))
        start += count
    assert start == len(prompt)
    assert results[:-1] == [{}] * (len(chunks) - 1)
    result = results[-1][seq_id]
    assert (result.token_ids, result.error, result.prompt_logprobs) == ((), None, None)
    return floats(result.embedding)


def floats(packed: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(packed, "<f4").tolist()
    return numbers


def test_what_is_pooled(make_driver: Callable[..., Any], fake_model: Any) -> None:
    kept: list[torch.Tensor] = []
    plain = fake_model.forward

    def forward(*args: Any) -> torch.Tensor:
        kept.append(plain(*args))
        return kept[-1]

    fake_model.forward = forward
    driver = make_driver(model=fake_model)
    last = embed(driver, 0, PROMPT, PoolingParams("last", normalize=False), [11])
    mean = embed(driver, 1, PROMPT, PoolingParams("mean", normalize=False), [11])
    assert last == kept[0][-1].tolist()
    assert mean == pytest.approx(kept[1].double().mean(dim=0).tolist(), rel=1e-6)
    assert mean != last


@pytest.mark.parametrize("params", [LAST, MEAN])
def test_length_one_and_fewer_numbers(
    make_driver: Callable[..., Any], params: PoolingParams
) -> None:
    driver = make_driver()
    raw = np.array(embed(driver, 0, PROMPT, PoolingParams(params.pooling_type, None, False), [11]))
    whole = np.array(embed(driver, 1, PROMPT, params, [11]))
    assert np.allclose(whole, raw / np.linalg.norm(raw), rtol=1e-6, atol=0)
    for dimensions in (2, 5, 32):  # token 0 is not in the prompt
        cut = PoolingParams(params.pooling_type, dimensions)
        found = embed(driver, 2, PROMPT, cut, [11])
        driver.remove(2)
        assert len(found) == dimensions
        assert np.linalg.norm(found) == pytest.approx(1.0)
        scale = np.linalg.norm(raw[:dimensions])
        assert np.allclose(found, raw[:dimensions] / scale, rtol=1e-6, atol=0)
        as_it_is = PoolingParams(params.pooling_type, dimensions, normalize=False)
        assert embed(driver, 3, PROMPT, as_it_is, [11]) == raw[:dimensions].tolist()
        driver.remove(3)


@pytest.mark.parametrize("params", [LAST, MEAN])
@pytest.mark.parametrize("chunks", [[1] * 11, [4, 4, 3], [10, 1], [1, 10]])
def test_the_same_bits_in_any_chunks(
    make_driver: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    params: PoolingParams,
    chunks: list[int],
) -> None:
    whole = embed(make_driver(), 0, PROMPT, params, [11])
    monkeypatch.setattr(pooling, "MAX_STATES_AT_ONCE", 3)
    assert embed(make_driver(), 0, PROMPT, params, chunks) == whole


def test_the_same_bits_in_company(make_driver: Callable[..., Any]) -> None:
    alone = [embed(make_driver(), 0, PROMPT, params, [11]) for params in (LAST, MEAN)]
    driver = make_driver()
    other = driver.new(0, [5, 6, 7], logprobs=1)
    scored = driver.new(1, [5, 6, 7], prompt_logprobs=1)
    new = (other, pooled(2, PROMPT, MEAN), scored, pooled(3, PROMPT, LAST))
    rows = [
        driver.row(0, 0, 3),
        driver.row(2, 0, 5, 0),
        driver.row(1, 0, 3, 0, first_scored=1, num_scored=2),
        driver.row(3, 0, 4, 0),
    ]
    first = driver.step(rows, new_rows=new)
    assert list(first) == [0, 1]
    assert len(first[1].prompt_logprobs) == 2
    rows = [driver.row(2, 5, 6, 0), driver.row(0, 3, 1), driver.row(3, 4, 7, 0)]
    second = driver.step(rows)
    assert list(second) == [2, 0, 3]
    assert [floats(second[3].embedding), floats(second[2].embedding)] == alone
    assert second[0].embedding is None
    alone_driver = make_driver()
    assert alone_driver.generate(0, [5, 6, 7], 2) == [*first[0].token_ids, *second[0].token_ids]


def test_a_step_of_embeddings_computes_no_logits(
    make_driver: Callable[..., Any], fake_model: Any
) -> None:
    fake_model.logits = None  # whoever calls it fails
    driver = make_driver(model=fake_model)
    for params in (LAST, MEAN):
        assert embed(driver, 0, PROMPT, params, [6, 5])
        driver.remove(0)


def test_an_interrupted_mean_begins_anew(make_driver: Callable[..., Any]) -> None:
    expected = embed(make_driver(), 0, PROMPT, MEAN, [11])
    driver = make_driver()
    driver.step([driver.row(0, 0, 6, 0)], new_rows=(pooled(0, PROMPT, MEAN),))
    driver.remove(0)
    assert embed(driver, 0, PROMPT, MEAN, [6, 5]) == expected


def test_the_place_of_an_interrupted_one_is_free_for_generation(
    make_driver: Callable[..., Any],
) -> None:
    expected = make_driver().generate(1, PROMPT, 5)
    driver = make_driver(max_num_seqs=1)
    driver.step([driver.row(0, 0, 6, 0)], new_rows=(pooled(0, PROMPT, MEAN),))
    driver.remove(0)
    assert driver.generate(1, PROMPT, 5) == expected


def test_a_mean_does_not_leave_out_tokens(make_driver: Callable[..., Any]) -> None:
    driver = make_driver()
    with pytest.raises(ExecutionError, match="pooled from token 4"):
        driver.step([driver.row(0, 4, 7, 0)], new_rows=(pooled(0, PROMPT, MEAN),))


def test_a_last_token_needs_no_other(make_driver: Callable[..., Any]) -> None:
    """What a prefix hit leaves to compute."""
    driver = make_driver()
    expected = embed(driver, 0, PROMPT, LAST, [11])
    driver.tables[1] = driver.tables[0]
    row = driver.row(1, 10, 1, 0, first_changed_block=0, num_unwritten=1)
    result = driver.step([row], new_rows=(pooled(1, PROMPT, LAST),))
    assert floats(result[1].embedding) == expected


@pytest.mark.parametrize("params", [LAST, MEAN])
def test_hidden_states_that_are_not_finite_are_an_error_of_their_row(
    make_driver: Callable[..., Any], params: PoolingParams
) -> None:
    driver = make_driver()
    new = pooled(0, [1, 31, 3], params), pooled(1, PROMPT, params)
    rows = [driver.row(0, 0, 3, 0), driver.row(1, 0, 11, 0)]
    results = driver.step(rows, new_rows=new)
    assert "hidden states are not finite" in results[0].error
    assert results[0].embedding is None
    assert floats(results[1].embedding) == embed(make_driver(), 0, PROMPT, params, [11])


def test_opposite_infinities_are_not_finite() -> None:
    pool = Pool(0, MEAN, 2)
    pool.add(torch.tensor([[float("inf"), 1.0], [float("-inf"), 1.0]]))
    assert "not finite" in (pool.result().error or "")


def test_a_vector_of_zeros_stays() -> None:
    pool = Pool(0, LAST, 1)
    pool.add(torch.zeros(1, 4))
    assert floats(pool.result().embedding or b"") == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_sums_lose_nothing(dtype: torch.dtype) -> None:
    pool = Pool(0, PoolingParams("mean", normalize=False), 4096)
    pool.add(torch.full((4096, 1), 0.1, dtype=dtype))
    assert floats(pool.result().embedding or b"") == [torch.tensor(0.1, dtype=dtype).item()]


def test_pools_that_are_misused() -> None:
    with pytest.raises(ExecutionError, match="pooled by None"):
        Pool(0, PoolingParams(), 1)
    pool = Pool(0, MEAN, 3)
    pool.add(torch.zeros(2, 4))
    with pytest.raises(ExecutionError, match="before its last token"):
        pool.result()
    pool.add(torch.zeros(1, 4))
    with pytest.raises(ExecutionError, match="pooled from token 3"):
        pool.wanted(3, 1)
