"""From logits to sampled tokens: which rows draw, by which rules, and what is reported of them.

The drawing itself is :meth:`~octavo.kernels.ops.Ops.sample`, a pure function of logits, parameters,
seed and position. Nothing here depends on which rows share a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.ops import Ops, SamplingTensors
from ..step import RowResult, SampleLogprobs
from .logit_rules import RuledRow, apply_rules
from .rows import RowTable

NONFINITE = "the model's logits are not finite"
NOTHING_LEFT = "penalties, bias and min_tokens leave no token that could be drawn"


class SampledRow(NamedTuple):
    """A row of the logits and how many tokens to draw from it."""

    seq_id: int
    place: int
    num_samples: int


class Sampler:
    """Draws tokens for the rows of a step."""

    def __init__(self, ops: Ops, table: RowTable) -> None:
        self._ops = ops
        self._table = table

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[RowResult]:
        """Draw for every row.

        Args:
            logits: ``[num_rows, vocab_size]`` float32; overwritten.
            rows: one per row of the logits, at least one.

        Returns:
            One result per row. A row with a NaN, +inf or nothing but -inf, as the model gave it or
            after the row's own rules, gets an error; no other row's result depends on it.
        """
        is_bad = _replace_nonfinite(logits)
        raw = self._copy_for_logprobs(logits, rows)
        ruled = self._ruled(rows)
        is_ruled_out = [False] * len(rows)
        if ruled:
            apply_rules(logits, ruled)
            is_ruled_out = _replace_nonfinite(logits)
        drawn = self._draw(logits, rows)
        results = []
        first = 0
        for index, row in enumerate(rows):
            token_ids = drawn[first : first + row.num_samples]
            first += row.num_samples
            if is_bad[index] or is_ruled_out[index]:
                error = NONFINITE if is_bad[index] else NOTHING_LEFT
                results.append(RowResult(row.seq_id, (), error=error))
            else:
                results.append(RowResult(row.seq_id, token_ids))
        return self._with_logprobs(results, raw, rows)

    def _ruled(self, rows: Sequence[SampledRow]) -> list[RuledRow]:
        rules = self._table.rules
        if not rules:
            return []
        return [
            RuledRow(index, rules[row.place], self._table.num_outputs(row.place))
            for index, row in enumerate(rows)
            if row.place in rules
        ]

    def _draw(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """All samples of all rows, one after the other; sample j of a row uses its seed + j."""
        counts = np.array([row.num_samples for row in rows], dtype=np.int64)
        places = np.array([row.place for row in rows], dtype=np.int64)
        offsets = np.zeros(len(rows), dtype=np.int64)
        if (counts != 1).any():
            index = np.repeat(np.arange(len(rows)), counts)
            offsets = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
            logits = logits.index_select(0, torch.from_numpy(index).to(logits.device))
            places = places[index]
        params = self._params(places, offsets, logits.device)
        drawn: list[int] = self._ops.sample(logits, params).tolist()
        return drawn

    def _params(
        self, places: NDArray[np.int64], offsets: NDArray[np.int64], device: torch.device
    ) -> SamplingTensors:
        columns = self._table.columns

        def tensor(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).to(device)

        return SamplingTensors(
            temperature=tensor(columns["temperature"][places]),
            top_k=tensor(columns["top_k"][places]),
            top_p=tensor(columns["top_p"][places]),
            min_p=tensor(columns["min_p"][places]),
            seed=tensor(columns["seed"][places] + offsets),
            position=tensor(columns["num_tokens"][places]),
        )

    def _copy_for_logprobs(self, logits: Tensor, rows: Sequence[SampledRow]) -> dict[int, Tensor]:
        """Unprocessed logits ``[vocab_size]`` of the rows that report log-probabilities."""
        sampling = self._table.sampling
        return {
            index: logits[index].clone()
            for index, row in enumerate(rows)
            if sampling[row.place].logprobs is not None
        }

    def _with_logprobs(
        self, results: list[RowResult], raw: dict[int, Tensor], rows: Sequence[SampledRow]
    ) -> list[RowResult]:
        for index, logits in raw.items():
            result = results[index]
            if result.error is None:
                num_top = self._table.sampling[rows[index].place].logprobs or 0
                logprobs = sample_logprobs(logits, result.token_ids, num_top)
                results[index] = result._replace(logprobs=logprobs)
        return results


def _replace_nonfinite(logits: Tensor) -> list[bool]:
    """Zero the rows of ``[num_rows, vocab_size]`` that cannot be drawn from; say which they are."""
    is_bad = ~torch.isfinite(logits.amax(dim=-1))
    if bool(is_bad.any()):
        logits[is_bad] = 0.0
    return is_bad.tolist()


def sample_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[SampleLogprobs, ...]:
    """What is reported of tokens drawn from ``logits [vocab_size]``, before any rule or filter.

    Args:
        num_top: alternatives wanted; -1: the whole vocabulary.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    count = len(logprobs) if num_top < 0 else min(num_top, len(logprobs))
    top = logprobs.topk(count)
    alternatives = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    reported = []
    for token_id in token_ids:
        rank = int((logprobs > logprobs[token_id]).sum()) + 1
        reported.append(SampleLogprobs(float(logprobs[token_id]), rank, alternatives))
    return tuple(reported)
