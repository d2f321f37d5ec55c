"""Draws one token per row without sorting the vocabulary unless a filter needs it."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import SamplingTensors
from .philox import philox_uniform

MIN_CANDIDATES = 256
"""Most likely tokens looked at first for top-p."""
CANDIDATE_GROWTH = 16
"""How many times more are looked at for the rows that this does not settle."""
MAX_ROWS_AT_ONCE = 64
"""Bounds the working memory, which is several times ``rows * vocab_size`` floats."""


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """See :meth:`~.ops.Ops.sample`."""
    tokens = likeliest(logits)
    random_rows = ((params.temperature > 0.0) & (tokens >= 0)).nonzero().squeeze(1)
    for begin in range(0, len(random_rows), MAX_ROWS_AT_ONCE):
        rows = random_rows[begin : begin + MAX_ROWS_AT_ONCE]
        tokens[rows] = _draw(logits[rows], _select(params, rows))
    return tokens


def likeliest(logits: Tensor) -> Tensor:
    """The most likely token of each row ``[num_rows, vocab_size]``, -1 where none can be drawn → ``[num_rows]``."""
    tokens = logits.argmax(dim=-1)  # of a NaN, if there is one
    is_drawable = logits.gather(1, tokens.unsqueeze(1)).squeeze(1).isfinite()
    return torch.where(is_drawable, tokens, -1)


def _select(params: SamplingTensors, rows: Tensor) -> SamplingTensors:
    return SamplingTensors(*(values[rows] for values in params))


def _draw(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Sample rows with temperature > 0, ``logits [num_rows, vocab_size]`` → ``[num_rows]``."""
    uniform = philox_uniform(params.seed, params.position)
    centred = logits - logits.amax(dim=-1, keepdim=True)
    weights = centred.div_(params.temperature.unsqueeze(1)).exp_()
    vocab_size = logits.shape[1]
    is_filtered = ((params.top_k > 0) & (params.top_k < vocab_size)) | (params.top_p < 1.0)
    if not bool(is_filtered.any()):
        return _draw_unfiltered(weights, params.min_p, uniform)
    if bool(is_filtered.all()):
        return _draw_filtered(logits, weights, params, uniform)
    tokens = torch.empty_like(params.position)
    for rows, draws in ((is_filtered, True), (~is_filtered, False)):
        chosen = _select(params, rows)
        tokens[rows] = (
            _draw_filtered(logits[rows], weights[rows], chosen, uniform[rows])
            if draws
            else _draw_unfiltered(weights[rows], chosen.min_p, uniform[rows])
        )
    return tokens


def _draw_unfiltered(weights: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Every token takes part, but for min-p, which needs no order: the largest weight is 1."""
    if bool((min_p > 0.0).any()):
        weights = weights.masked_fill(weights < min_p.unsqueeze(1), 0.0)
    return inverse_cdf(weights, uniform)


def _draw_filtered(
    logits: Tensor, weights: Tensor, params: SamplingTensors, uniform: Tensor
) -> Tensor:
    """Top-k, top-p and min-p over as many of the most likely tokens as each row needs."""
    vocab_size = logits.shape[1]
    is_top_k = (params.top_k > 0) & (params.top_k < vocab_size)
    most = int(params.top_k[is_top_k].max()) if bool(is_top_k.any()) else 0
    num_candidates = min(vocab_size, max(MIN_CANDIDATES, most))
    tokens, is_settled = _draw_candidates(logits, weights, params, uniform, num_candidates)
    left = (~is_settled).nonzero().squeeze(1)
    while len(left):
        num_candidates = min(vocab_size, CANDIDATE_GROWTH * num_candidates)
        tokens[left], is_settled = _draw_candidates(
            logits[left], weights[left], _select(params, left), uniform[left], num_candidates
        )
        left = left[~is_settled]
    return tokens


def _draw_candidates(
    logits: Tensor, weights: Tensor, params: SamplingTensors, uniform: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Filter and draw among the ``num_candidates`` most likely tokens.

    Returns:
        ``(tokens [num_rows] int64, is_settled [num_rows] bool)``; a row is settled if no token
        beyond the candidates could pass its filters.
    """
    vocab_size = logits.shape[1]
    ids = _most_likely(logits, num_candidates)
    ranked = weights.gather(1, ids).double()
    is_top_k = (params.top_k > 0) & (params.top_k < vocab_size)
    limit = torch.where(is_top_k, params.top_k, num_candidates).unsqueeze(1)
    rank = torch.arange(num_candidates, device=logits.device)
    ranked = ranked.masked_fill_(rank >= limit, 0.0)
    mass = ranked.cumsum(dim=-1)
    total = torch.where(is_top_k, mass[:, -1], weights.sum(dim=-1, dtype=torch.float64))
    nucleus = torch.where(params.top_p < 1.0, params.top_p.double() * total, torch.inf)
    is_settled = is_top_k | (mass[:, -1] >= nucleus)
    if num_candidates == vocab_size:
        is_settled = torch.ones_like(is_settled)
    is_kept = (mass - ranked < nucleus.unsqueeze(1)) & (ranked >= params.min_p.unsqueeze(1))
    kept = ranked.masked_fill_(~is_kept, 0.0)
    ids, by_id = ids.sort(dim=-1)
    column = inverse_cdf(kept.gather(1, by_id), uniform)
    return ids.gather(1, column.unsqueeze(1)).squeeze(1), is_settled


def _most_likely(logits: Tensor, num: int) -> Tensor:
    """Ids of the ``num`` largest logits, largest first, the lower id first on a tie.

    Sorts 64-bit keys: the logit's bits, made monotone, above the id's complement.
    """
    vocab_size = logits.shape[1]
    complement = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (monotone_bits(logits).long() << 32) | complement
    if num < vocab_size:
        top = keys.topk(num, dim=-1).values
    else:
        top = keys.sort(dim=-1, descending=True).values
    return vocab_size - 1 - (top & 0xFFFFFFFF)


def monotone_bits(logits: Tensor) -> Tensor:
    """Integers in the order of ``logits`` float32, as int32 of the same shape."""
    bits = (logits + 0.0).view(torch.int32)  # adding makes -0.0, which ties with 0.0, the same bits
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """First column whose cumulative weight exceeds ``uniform`` of the total; its weight is not 0.

    Args:
        weights: ``[num_rows, n]``, not negative, each row with a positive sum.
        uniform: ``[num_rows]`` float64 in [0, 1).
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
