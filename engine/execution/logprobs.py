"""What is reported of log-probabilities: those of drawn tokens, and the most likely tokens.

Works on whole batches. Knows tensors and token ids, no rows and no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..step import SampleLogprobs
from .transfer import to_device

MAX_TOKENS_AT_ONCE = 16
"""Bounds the working memory of ranks, which is ``tokens * vocab_size`` floats."""

Likely = tuple[tuple[int, float], ...]
"""(Token id, logprob), most likely first."""


def most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row of ``logprobs [num_rows, vocab_size]``, the lower id first on a tie.

    Args:
        count: how many, at most ``vocab_size``.

    Returns:
        ``(values, ids)``, each ``[num_rows, count]``, largest first.
    """
    values, ids = logprobs.topk(min(count + 1, logprobs.shape[1]))
    is_tied = (values[:, count - 1 : -1] == values[:, count:]).any(dim=-1)  # with one left out
    ids = ids[:, :count]
    if bool(is_tied.any()):
        order = logprobs[is_tied].sort(dim=-1, descending=True, stable=True).indices
        ids[is_tied] = order[:, :count]
    ids = ids.sort(dim=-1).values
    values, order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def likely_tokens(logprobs: Tensor, counts: Sequence[int]) -> list[Likely]:
    """The most likely tokens of each row of ``logprobs [num_rows, vocab_size]``.

    Args:
        counts: per row how many; -1, or more than there are: the whole vocabulary.
    """
    vocab_size = logprobs.shape[1]
    rows_of: dict[int, list[int]] = {}
    for row, count in enumerate(counts):
        rows_of.setdefault(vocab_size if count < 0 else min(count, vocab_size), []).append(row)
    likely: list[Likely] = [()] * len(counts)
    for count, rows in rows_of.items():
        if count == 0:
            continue
        values, ids = most_likely(select_rows(logprobs, rows), count)
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            likely[row] = tuple(zip(row_ids, row_values, strict=True))
    return likely


def sample_logprobs(
    logprobs: Tensor,
    token_ids: Sequence[Sequence[int]],
    num_top: Sequence[int],
    named: Sequence[Sequence[int]] = (),
) -> list[tuple[SampleLogprobs, ...]]:
    """What is reported of tokens drawn from the rows of ``logprobs [num_rows, vocab_size]``.

    Args:
        token_ids: per row the tokens drawn from it.
        num_top: per row how many alternatives are wanted; -1: the whole vocabulary.
        named: per row the alternatives that are wanted instead, where there are any.
    """
    alternatives = likely_tokens(logprobs, num_top)
    ranks: list[tuple[int, ...]] = [()] * len(token_ids)
    for row, ids in enumerate(named):
        if ids:
            alternatives[row], ranks[row] = _named(logprobs, row, ids)
    rows = [row for row, drawn in enumerate(token_ids) for _ in drawn]
    columns = [token_id for drawn in token_ids for token_id in drawn]
    reported: list[list[SampleLogprobs]] = [[] for _ in token_ids]
    for begin in range(0, len(rows), MAX_TOKENS_AT_ONCE):
        chunk = slice(begin, begin + MAX_TOKENS_AT_ONCE)
        for row, one in zip(
            rows[chunk], _ranked(logprobs, rows[chunk], columns[chunk]), strict=True
        ):
            reported[row].append(SampleLogprobs(*one, alternatives[row], ranks[row]))
    return [tuple(ones) for ones in reported]


def _named(logprobs: Tensor, row: int, token_ids: Sequence[int]) -> tuple[Likely, tuple[int, ...]]:
    """Certain tokens of one row and their ranks, in the order of ``token_ids``."""
    found: list[tuple[float, int]] = []
    for begin in range(0, len(token_ids), MAX_TOKENS_AT_ONCE):
        chunk = token_ids[begin : begin + MAX_TOKENS_AT_ONCE]
        found += _ranked(logprobs, [row] * len(chunk), chunk)
    pairs = zip(token_ids, found, strict=True)
    return tuple((i, logprob) for i, (logprob, _) in pairs), tuple(rank for _, rank in found)


def select_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """``values[rows]``, at least one row; a view where they follow each other."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return values[rows[0] : rows[0] + len(rows)]
    return values.index_select(0, to_device(rows, values.device))


def _ranked(
    logprobs: Tensor, rows: Sequence[int], columns: Sequence[int]
) -> list[tuple[float, int]]:
    """``(logprob, rank)`` of each ``logprobs[row, column]`` within its row."""
    seen = select_rows(logprobs, rows)
    chosen = seen.gather(1, to_device(columns, logprobs.device).unsqueeze(1))
    ranks = (seen > chosen).sum(dim=-1, dtype=torch.int32) + 1
    return list(zip(chosen.squeeze(1).tolist(), ranks.tolist(), strict=True))
