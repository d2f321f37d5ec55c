"""Prompt tokens are scored in the rows that compute them: any chunks, few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.engine.execution import prompt_scores
from octavo.engine.execution.errors import ExecutionError

PROMPT = [3, 9, 4, 4, 27, 1, 8, 15, 2, 30, 6]


def score(driver: Any, seq_id: int, prompt: list[int], chunks: list[int], **sampling: Any) -> Any:
    """All scores of a prompt, computed in these chunks; and the last chunk's result."""
    new = driver.new(seq_id, prompt, **sampling)
    start, found, result = 0, [], None
    for index, count in enumerate(chunks):
        first = max(1, start + 1)
        end = min(start + count, len(prompt) - 1)
        row = driver.row(
            seq_id,
            start,
            count,
            int(start + count == len(prompt)),
            first_scored=first,
            num_scored=max(0, end - first + 1),
        )
        result = driver.step([row], new_rows=(new,) if not index else ()).get(seq_id)
        if row.num_scored:
            assert len(result.prompt_logprobs) == row.num_scored
            found += result.prompt_logprobs
        start += count
    return found, result


@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 4, 3], [10, 1]])
def test_scores_are_those_of_the_position_before(make_driver: Any, chunks: list[int]) -> None:
    driver = make_driver()
    found, last = score(driver, 0, PROMPT, chunks, prompt_logprobs=3, logprobs=0)
    assert len(found) == len(PROMPT) - 1
    assert len(last.token_ids) == len(last.logprobs) == 1
    for position, one in enumerate(found, start=1):
        other = make_driver()
        new = other.new(0, PROMPT[:position], logprobs=3)
        (sampled,) = other.step([other.row(0, 0, position)], new_rows=(new,))[0].logprobs
        in_top = dict(one.top)
        assert in_top == pytest.approx(dict(sampled.top), abs=1e-5)
        if PROMPT[position] in in_top:
            assert one.logprob == in_top[PROMPT[position]]
        else:
            assert one.logprob <= one.top[-1][1]
            assert one.rank > 3


def test_the_head_sees_a_few_rows_at_a_time(
    make_driver: Callable[..., Any], fake_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "MAX_ROWS_AT_ONCE", 4)
    whole, _ = score(make_driver(), 0, PROMPT, [11], prompt_logprobs=2)
    sizes: list[int] = []
    plain: Callable[[torch.Tensor], torch.Tensor] = fake_model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return plain(hidden)

    fake_model.logits = logits
    pieces, _ = score(make_driver(model=fake_model), 0, PROMPT, [11], prompt_logprobs=2)
    assert pieces == whole
    assert sizes == [1, 4, 4, 2]  # the sampled row, then the scored ones


def test_a_row_that_wants_nothing_gives_nothing(make_driver: Callable[..., Any]) -> None:
    driver = make_driver()
    new = driver.new(0, PROMPT), driver.new(1, PROMPT, prompt_logprobs=0)
    rows = [driver.row(0, 0, 11), driver.row(1, 0, 5, 0, first_scored=1, num_scored=5)]
    results = driver.step(rows, new_rows=new)
    assert results[0].prompt_logprobs is None
    assert results[1].token_ids == ()
    assert len(results[1].prompt_logprobs) == 5


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 6), (6, 1), (1, 11)])
def test_tokens_outside_the_row_are_refused(
    make_driver: Callable[..., Any], first: int, count: int
) -> None:
    driver = make_driver()
    row = driver.row(0, 0, 5, 0, first_scored=first, num_scored=count)
    with pytest.raises(ExecutionError, match="scored outside"):
        driver.step([row], new_rows=(driver.new(0, PROMPT, prompt_logprobs=0),))


def test_logits_that_are_not_finite_are_an_error_of_their_row(
    make_driver: Callable[..., Any],
) -> None:
    driver = make_driver()
    new = driver.new(0, [1, 31, 3, 4], prompt_logprobs=0), driver.new(1, PROMPT, prompt_logprobs=0)
    rows = [
        driver.row(0, 0, 3, 0, first_scored=1, num_scored=3),
        driver.row(1, 0, 5, 0, first_scored=1, num_scored=5),
    ]
    results = driver.step(rows, new_rows=new)
    assert "not finite" in results[0].error
    assert results[0].prompt_logprobs is None
    assert len(results[1].prompt_logprobs) == 5
