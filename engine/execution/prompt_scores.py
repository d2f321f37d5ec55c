"""Log-probabilities of prompt tokens: the head's product and what is reported of it, a few rows at a time.

Knows hidden states and token ids, no rows of the table and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..step import SampleLogprobs
from .logprobs import sample_logprobs

MAX_ROWS_AT_ONCE = 256
"""Bounds the working memory, which is a few times ``rows * vocab_size`` floats."""


class ScoredRow(NamedTuple):
    """Prompt tokens of one sequence that follow each other."""

    seq_id: int
    token_ids: Sequence[int]
    num_top: int  # alternatives of each; -1: the whole vocabulary


def score_rows(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, rows: Sequence[ScoredRow]
) -> list[tuple[SampleLogprobs, ...] | None]:
    """What is reported of the rows' tokens.

    Args:
        logits_of: ``[n, hidden_size]`` to logits ``[n, vocab_size]`` float32.
        hidden: ``[num_tokens, hidden_size]``: of the token before each of the rows' tokens, in order.

    Returns:
        Per row one entry per token; ``None`` if some of its logits are not finite.
    """
    token_ids = [token_id for row in rows for token_id in row.token_ids]
    num_top = [row.num_top for row in rows for _ in row.token_ids]
    found: list[SampleLogprobs | None] = []
    for begin in range(0, len(token_ids), MAX_ROWS_AT_ONCE):
        chunk = slice(begin, begin + MAX_ROWS_AT_ONCE)
        found += _score(logits_of(hidden[chunk]), token_ids[chunk], num_top[chunk])
    entries = iter(found)
    return [_complete(list(islice(entries, len(row.token_ids)))) for row in rows]


def _score(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[SampleLogprobs | None]:
    """One entry per row of ``logits [num_rows, vocab_size]``; ``None`` where they are not finite."""
    is_finite = torch.isfinite(logits.amax(dim=-1)).tolist()
    reported = sample_logprobs(torch.log_softmax(logits, dim=-1), [[t] for t in token_ids], num_top)
    return [one if good else None for (one,), good in zip(reported, is_finite, strict=True)]


def _complete(entries: list[SampleLogprobs | None]) -> tuple[SampleLogprobs, ...] | None:
    known = tuple(entry for entry in entries if entry is not None)
    return known if len(known) == len(entries) else None
