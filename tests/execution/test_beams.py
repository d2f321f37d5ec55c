"""Beams: rows that name candidates and draw nothing, and forks that follow the chosen ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from octavo.engine.execution.sampler import NONFINITE
from octavo.engine.step import BlockCopy, Fork

PROMPT = [3, 14, 15, 9, 26, 5, 3, 5, 8]
POISON = 31
EOS = 2
BLOCK_SIZE = 4


def _plain_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """The fake's formula without any cache: running means of running means of scaled one-hots."""
    x = torch.eye(32)[token_ids] * torch.arange(1.0, len(token_ids) + 1)[:, None]
    for _ in range(2):
        x = x.cumsum(0) / torch.arange(1.0, len(token_ids) + 1)[:, None]
    return torch.log_softmax(x[-1] @ model.head, dim=-1)


def _ask(row: Any, count: int) -> Any:
    return row._replace(num_samples=0, num_candidates=count)


def _candidates(driver: Any, seq_id: int, outputs: list[int], **sampling: Any) -> Any:
    """Of a sequence that is computed at once, alone."""
    known = len(PROMPT) + len(outputs)
    row = _ask(driver.row(seq_id, 0, known), 6)
    new = driver.new(seq_id, PROMPT, outputs, **sampling)
    return driver.step([row], new_rows=(new,))[seq_id].candidates


def _assert_same(found: Any, expected: Any) -> None:
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [value for _, value in found] == pytest.approx([v for _, v in expected], abs=1e-4)


def test_candidates_equal_a_plain_computation(make_driver: Any, fake_model: Any) -> None:
    driver = make_driver(model=fake_model)
    outputs = [7, 7, 4]
    plain = _plain_logprobs(fake_model, PROMPT + outputs)
    best = plain.topk(6)
    _assert_same(
        _candidates(driver, 0, outputs),
        list(zip(*map(torch.Tensor.tolist, best[::-1]), strict=True)),
    )
    likely = best.indices.tolist()
    ruled = plain.clone()
    ruled[EOS] = -math.inf
    ruled[[7, 4]] -= torch.tensor([2.0, 1.0]) * 0.5
    ruled[likely[0]] -= 4.0
    best = ruled.topk(6)
    found = _candidates(
        driver, 1, outputs, min_tokens=5, frequency_penalty=0.5, logit_bias={likely[0]: -4.0}
    )
    _assert_same(found, list(zip(*map(torch.Tensor.tolist, best[::-1]), strict=True)))


def test_rows_that_draw_and_rows_that_name_candidates_share_a_step(make_driver: Any) -> None:
    driver = make_driver(max_num_seqs=8)
    prompts = {0: PROMPT, 1: [7, 7, 1], 2: [30, 1], 3: [1, POISON], 4: [9] * 6}
    rows = [driver.row(seq_id, 0, len(prompt), num_samples=2) for seq_id, prompt in prompts.items()]
    for index, count in ((0, 4), (2, 99), (3, 4)):
        rows[index] = _ask(rows[index], count)
    news = tuple(
        driver.new(seq_id, prompt, temperature=1.0, logprobs=1)
        for seq_id, prompt in prompts.items()
    )
    together = driver.step(rows, new_rows=news)
    assert list(together) == list(prompts)
    for seq_id, row in zip(prompts, rows, strict=True):
        alone = make_driver()
        alone.tables[seq_id] = list(driver.tables[seq_id])
        expected = alone.step([row], new_rows=(news[seq_id],))[seq_id]
        assert together[seq_id].token_ids == expected.token_ids
        _assert_same(together[seq_id].candidates or (), expected.candidates or ())
    assert [len(together[i].candidates) for i in (0, 2)] == [4, 32]
    assert [len(together[i].token_ids) for i in prompts] == [0, 2, 0, 0, 2]
    assert (together[3].error, together[3].candidates) == (NONFINITE, None)
    assert [len(together[i].logprobs) for i in (0, 2)] == [4, 32]  # one per candidate


def test_nothing_is_appended(make_driver: Any) -> None:
    """Naming candidates twice is the same row twice; the choice comes with the next plan."""
    driver = make_driver()
    row = _ask(driver.row(0, 0, len(PROMPT)), 3)
    first = driver.step([row], new_rows=(driver.new(0, PROMPT),))
    last = _ask(driver.row(0, len(PROMPT) - 1, 1), 3)
    _assert_same(driver.step([last])[0].candidates, first[0].candidates)
    chosen = first[0].candidates[1][0]
    row = driver.row(0, len(PROMPT), 1, appended_token_ids=(chosen,))
    found = driver.step([_ask(row, 6)])[0].candidates
    _assert_same(found, _candidates(make_driver(), 0, [chosen]))


class _Beams:
    """A beam search by hand, with a fresh copy of the half-full block for every fork."""

    def __init__(self, driver: Any, **sampling: Any) -> None:
        self.driver = driver
        self.outputs: dict[int, list[int]] = {0: []}
        self.num_ids = 0
        row = _ask(driver.row(0, 0, len(PROMPT)), 6)
        self.candidates = {
            0: driver.step([row], new_rows=(driver.new(0, PROMPT, **sampling),))[0].candidates
        }

    def advance(self, chosen: list[tuple[int, int]], *, is_in_place: bool) -> None:
        """Go on with ``(parent, rank of its candidate)``.

        ``is_in_place``: each parent's first child takes its place; else parents are removed and all
        children forked.
        """
        outputs: dict[int, list[int]] = {}
        rows, forks, copies = [], [], []
        start = len(PROMPT) + len(next(iter(self.outputs.values())))
        for parent, rank in chosen:
            token = self.candidates[parent][rank][0]
            seq_id = parent if is_in_place and parent not in outputs else self._next_id()
            if seq_id != parent:
                forks.append(Fork(parent, seq_id, start, seed=0))
                copies += self._share(parent, seq_id, start)
            outputs[seq_id] = [*self.outputs[parent], token]
            rows.append((seq_id, token))
        removed = tuple(seq_id for seq_id in self.outputs if seq_id not in outputs)
        plan_rows = [
            _ask(
                self.driver.row(
                    seq_id,
                    start,
                    1,
                    appended_token_ids=(token,),
                    first_changed_block=start // BLOCK_SIZE,
                ),
                6,
            )
            for seq_id, token in rows
        ]
        result = self.driver.step(
            plan_rows, forks=tuple(forks), removed_seq_ids=removed, block_copies=tuple(copies)
        )
        self.outputs = outputs
        self.candidates = {seq_id: row.candidates for seq_id, row in result.items()}

    def _next_id(self) -> int:
        self.num_ids += 1
        return self.num_ids

    def _share(self, parent: int, child: int, num_tokens: int) -> list[BlockCopy]:
        driver = self.driver
        table = list(driver.tables[parent][: num_tokens // BLOCK_SIZE])
        driver.tables[child] = table
        if num_tokens % BLOCK_SIZE == 0:
            return []
        table.append(driver.free.pop())
        return [BlockCopy(0, driver.tables[parent][len(table) - 1], table[-1])]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"frequency_penalty": 1.5, "repetition_penalty": 1.2}, {"min_tokens": 4}],
    ids=["plain", "penalties", "min_tokens"],
)
def test_beams_fork_for_generations(make_driver: Any, sampling: dict[str, Any]) -> None:
    """In each generation, every beam's candidates are those of its tokens computed from nothing."""
    driver = make_driver(num_blocks=80, block_size=BLOCK_SIZE)
    beams = _Beams(driver, **sampling)
    for generation in range(6):
        seq_ids = list(beams.outputs)
        choices = [(seq_ids[-1], 1), (seq_ids[0], 0), (seq_ids[-1], 0)]
        beams.advance(choices, is_in_place=generation % 2 == 1)
        assert len(beams.outputs) == len(driver.runner._table) == 3
        for seq_id, outputs in beams.outputs.items():
            assert len(outputs) == generation + 1
            _assert_same(
                beams.candidates[seq_id], _candidates(make_driver(), 0, outputs, **sampling)
            )


@pytest.mark.parametrize("num_kept", range(4))
def test_a_fork_may_go_back_in_its_parents_outputs(make_driver: Any, num_kept: int) -> None:
    """Its penalties count what it starts with, not what the parent went on to say."""
    options = {"frequency_penalty": 2.0}
    driver = make_driver(block_size=1)
    outputs = driver.generate(0, PROMPT, 4, **options)
    num_tokens = len(PROMPT) + num_kept
    driver.tables[1] = driver.tables[0][:num_tokens]
    row = driver.row(1, num_tokens, 1, appended_token_ids=(20,), first_changed_block=num_tokens)
    fork = Fork(0, 1, num_tokens, seed=0)
    found = driver.step([_ask(row, 6)], forks=(fork,))[1].candidates
    _assert_same(found, _candidates(make_driver(), 0, [*outputs[:num_kept], 20], **options))
