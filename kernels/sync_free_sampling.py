"""Draws one token per row without ever asking the device for a number: for GPUs, where that waits.

The tokens that top-k and top-p keep are found without sorting: the filter's last value is searched bit by
bit, each time by a sum over the row. The draw itself is :mod:`~.torch_sampling`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import SamplingSummary, SamplingTensors
from .philox import philox_uniform
from .torch_sampling import inverse_cdf, likeliest, monotone_bits

MAX_ROWS_AT_ONCE = 64
"""Bounds the working memory, which is several times ``rows * vocab_size`` doubles."""
EVERYTHING = SamplingSummary(has_random=True, has_top_k=True, has_top_p=True, has_min_p=True)


def sample(logits: Tensor, params: SamplingTensors, summary: SamplingSummary | None) -> Tensor:
    """See :meth:`~.ops.Ops.sample`. What ``summary`` rules out is not computed."""
    summary = EVERYTHING if summary is None else summary
    greedy = likeliest(logits)
    if not summary.has_random:
        return greedy
    drawn = [
        _draw(logits[rows], SamplingTensors(*(values[rows] for values in params)), summary)
        for begin in range(0, len(logits), MAX_ROWS_AT_ONCE)
        for rows in [slice(begin, begin + MAX_ROWS_AT_ONCE)]
    ]
    return torch.where((params.temperature > 0.0) & (greedy >= 0), torch.cat(drawn), greedy)


def _draw(logits: Tensor, params: SamplingTensors, summary: SamplingSummary) -> Tensor:
    """Sample every row, greedy ones at temperature 1; ``logits [num_rows, vocab_size]`` → ``[num_rows]``."""
    temperature = torch.where(params.temperature > 0.0, params.temperature, 1.0)
    centred = logits - logits.amax(dim=-1, keepdim=True)
    weights = centred.div_(temperature.unsqueeze(1)).exp_()  # the largest is 1
    if summary.has_top_k or summary.has_top_p:
        order = monotone_bits(logits)
        if summary.has_top_k:
            limit = torch.where(params.top_k > 0, params.top_k, logits.shape[1])
            is_kept = _leading(order, torch.ones_like(weights), limit.double().unsqueeze(1))
            weights = weights.masked_fill(~is_kept, 0.0)
        if summary.has_top_p:
            nucleus = params.top_p.double() * weights.sum(dim=-1, dtype=torch.float64)
            nucleus = torch.where(params.top_p < 1.0, nucleus, torch.inf).unsqueeze(1)
            weights = weights.masked_fill(~_leading(order, weights, nucleus), 0.0)
    if summary.has_min_p:
        weights = weights.masked_fill(weights < params.min_p.unsqueeze(1), 0.0)
    return inverse_cdf(weights, philox_uniform(params.seed, params.position))


def _leading(order: Tensor, amounts: Tensor, target: Tensor) -> Tensor:
    """The tokens before which, in descending ``order`` and then by id, the amounts sum to less than a target.

    Args:
        order: ``[num_rows, vocab_size]`` int32.
        amounts: ``[num_rows, vocab_size]`` float32, not negative.
        target: ``[num_rows, 1]`` float64, positive.

    Returns:
        ``[num_rows, vocab_size]`` bool.
    """

    def total(is_counted: Tensor) -> Tensor:
        return torch.where(is_counted, amounts, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)

    # The largest value down to which the target is reached, from the highest bit to the lowest.
    last = torch.full_like(target, -(2**31), dtype=torch.int64)
    for bit in range(31, -1, -1):
        higher = last + (1 << bit)
        last = torch.where(total(order >= higher) >= target, higher, last)
    is_above, is_last = order > last, order == last
    ties = torch.where(is_last, amounts, 0.0).double()
    before = total(is_above) + ties.cumsum(dim=-1) - ties
    return is_above | (is_last & (before < target))
