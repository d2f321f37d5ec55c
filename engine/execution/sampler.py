"""From logits to tokens: which rows draw and which name candidates, by which rules, and the reports.

The drawing itself is :meth:`~octavo.kernels.ops.Ops.sample`, a pure function of logits, parameters,
seed and position. Nothing here depends on which rows share a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.ops import Ops, SamplingSummary, SamplingTensors
from ..errors import NOTHING_LEFT
from ..step import RowResult
from .logit_rules import RuledRow, apply_rules
from .logprobs import likely_tokens, sample_logprobs, select_rows
from .rows import RowTable
from .transfer import Transfer, to_device

NONFINITE = "the model's logits are not finite"


class SampledRow(NamedTuple):
    """A row of the logits, and how many tokens to draw from it or how many candidates to name."""

    seq_id: int
    place: int
    num_samples: int
    num_candidates: int = 0


class _Reported(NamedTuple):
    """Rows whose samples or candidates come with log-probabilities."""

    indices: list[int]  # into the step's rows
    logprobs: Tensor  # [num_indices, vocab_size] float32
    num_top: list[int]
    named: list[tuple[int, ...]]  # alternatives that are wanted in place of the most likely


class Sampler:
    """Draws tokens for the rows of a step."""

    def __init__(self, ops: Ops, table: RowTable, transfer: Transfer) -> None:
        self._transfer = transfer
        self._ops = ops
        self._table = table

    def are_plain(self, rows: Sequence[SampledRow]) -> bool:
        """Whether each row wants one token, the most likely one, and nothing else."""
        if any(row.num_samples != 1 for row in rows):
            return False
        return bool(self._table.columns["is_plain"][[row.place for row in rows]].all())

    def take(self, tokens: Tensor, rows: Sequence[SampledRow]) -> list[RowResult]:
        """What :meth:`sample` gives for plain rows whose most likely tokens ``[num_rows]`` are known."""
        (token_ids,) = self._transfer.download(tokens)
        return [
            RowResult(row.seq_id, [token_id])
            if token_id >= 0
            else RowResult(row.seq_id, (), error=NONFINITE)
            for row, token_id in zip(rows, token_ids, strict=True)
        ]

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[RowResult]:
        """Draw for every row, or name its candidates.

        Candidates are the most likely tokens by ``log_softmax`` with the row's rules applied to its
        result, as transformers' beam search does; those that a rule forbids are left out.

        Args:
            logits: ``[num_rows, vocab_size]`` float32; overwritten.
            rows: one per row of the logits, at least one.

        Returns:
            One result per row. A row with a NaN, +inf or nothing but -inf, as the model gave it or
            after the row's own rules, gets an error; no other row's result depends on it.
        """
        reported = self._reported(logits, rows)
        beams = _to_logprobs(logits, rows)
        ruled = self._ruled(rows)
        checks = [_has_finite_peak(logits)] if ruled or beams else []
        if ruled:
            apply_rules(logits, ruled)
            checks.append(_has_finite_peak(logits))
        drawn, *found = self._transfer.download(self._draw(logits, rows), *checks)
        results = []
        first = 0
        for index, row in enumerate(rows):
            token_ids = drawn[first : first + row.num_samples]
            first += row.num_samples
            is_finite = [column[index] for column in found]  # before the rules, after them
            if -1 in token_ids or not all(is_finite):
                error = NOTHING_LEFT if any(is_finite) else NONFINITE
                results.append(RowResult(row.seq_id, (), error=error))
            else:
                results.append(RowResult(row.seq_id, token_ids))
        _with_candidates(results, logits, rows, beams)
        if reported is not None:
            _with_logprobs(results, reported)
        return results

    def _ruled(self, rows: Sequence[SampledRow]) -> list[RuledRow]:
        rules = self._table.rules
        if not rules:
            return []
        return [
            RuledRow(index, rules[row.place], self._table.num_outputs(row.place))
            for index, row in enumerate(rows)
            if row.place in rules
        ]

    def _draw(self, logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
        """All samples of all rows, one after the other; sample j of a row uses its seed + j."""
        counts = np.array([row.num_samples for row in rows], dtype=np.int64)
        places = np.array([row.place for row in rows], dtype=np.int64)
        offsets = np.zeros(len(rows), dtype=np.int64)
        if (counts != 1).any():
            index = np.repeat(np.arange(len(rows)), counts)
            offsets = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
            if not len(index):
                return torch.empty(0, dtype=torch.int64, device=logits.device)
            logits = logits.index_select(0, self._transfer.upload(index)[0])
            places = places[index]
        return self._ops.sample(logits, *self._params(places, offsets))

    def _params(
        self, places: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[SamplingTensors, SamplingSummary | None]:
        columns = self._table.columns
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "num_tokens")
        values = [columns[name][places] for name in names]
        values[4] = values[4] + offsets
        tensors = SamplingTensors(*self._transfer.upload(*values))
        if not self._transfer.is_asynchronous:
            return tensors, None
        temperature, top_k, top_p, min_p = values[:4]
        summary = SamplingSummary(
            has_random=bool((temperature > 0).any()),
            has_top_k=bool((top_k > 0).any()),
            has_top_p=bool((top_p < 1).any()),
            has_min_p=bool((min_p > 0).any()),
        )
        return tensors, summary

    def _reported(self, logits: Tensor, rows: Sequence[SampledRow]) -> _Reported | None:
        """Log-probabilities of the rows that report those of their tokens, before any rule."""
        sampling = self._table.sampling
        indices = [index for index, row in enumerate(rows) if sampling[row.place].needs_logprobs]
        if not indices:
            return None
        asked = [sampling[rows[index].place] for index in indices]
        return _Reported(
            indices,
            torch.log_softmax(select_rows(logits, indices), dim=-1),
            [0 if one.logprob_token_ids else one.logprobs or 0 for one in asked],
            [one.logprob_token_ids for one in asked],
        )


def _has_finite_peak(logits: Tensor) -> Tensor:
    """Which rows of ``[num_rows, vocab_size]`` can be drawn from → ``[num_rows]`` bool."""
    return torch.isfinite(logits.amax(dim=-1))


def _with_logprobs(results: list[RowResult], reported: _Reported) -> None:
    token_ids = [_chosen(results[index]) for index in reported.indices]
    found = sample_logprobs(reported.logprobs, token_ids, reported.num_top, reported.named)
    for index, logprobs in zip(reported.indices, found, strict=True):
        if results[index].error is None:
            results[index] = results[index]._replace(logprobs=logprobs)


def _chosen(result: RowResult) -> Sequence[int]:
    if result.candidates is None:
        return result.token_ids
    return [token_id for token_id, _ in result.candidates]


def _to_logprobs(logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Normalise the rows that want candidates, in place; their indices."""
    indices = [index for index, row in enumerate(rows) if row.num_candidates]
    if indices:
        place = to_device(indices, logits.device)
        logits[place] = torch.log_softmax(select_rows(logits, indices), dim=-1)
    return indices


def _with_candidates(
    results: list[RowResult], logprobs: Tensor, rows: Sequence[SampledRow], indices: list[int]
) -> None:
    """``logprobs [num_rows, vocab_size]`` are those of all rows, after their rules."""
    if not indices:
        return
    counts = [rows[index].num_candidates for index in indices]
    found = likely_tokens(select_rows(logprobs, indices), counts)
    for index, likely in zip(indices, found, strict=True):
        if results[index].error is None:
            candidates = tuple(one for one in likely if one[1] > -math.inf)
            results[index] = results[index]._replace(token_ids=(), candidates=candidates)
