"""Mixtures of experts in torch: routing for every set that computes with torch, and a product an expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from . import torch_linear
from .ops import QuantizedRows, dense
from .torch_linear import PackedLinear


class TorchExpert(NamedTuple):
    """One expert's linear layers."""

    gate_up: PackedLinear
    down: PackedLinear


def pack_experts(
    gate_up: Iterable[Tensor | QuantizedRows], down: Iterable[Tensor | QuantizedRows]
) -> list[TorchExpert]:
    first = [torch_linear.pack_linear(dense(weight), None) for weight in gate_up]
    second = [torch_linear.pack_linear(dense(weight), None) for weight in down]
    return [TorchExpert(*pair) for pair in zip(first, second, strict=True)]


def route(router_logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Each token's experts, by descending logit, and what their results are weighed by.

    Nothing waits for the device.

    Returns:
        ``[num_tokens, top_k]`` int64, and float32.
    """
    wide = router_logits.float()
    ids = torch.sort(wide, dim=-1, descending=True, stable=True).indices[:, :top_k]
    if renormalise:
        return ids, torch.softmax(wide.gather(1, ids), dim=-1)
    return ids, torch.softmax(wide, dim=-1).gather(1, ids)


def mix(x: Tensor, ids: Tensor, weights: Tensor, experts: list[TorchExpert]) -> Tensor:
    """Weighed results of each token's experts, ``[num_tokens, hidden]``.

    Args:
        x: ``[num_tokens, hidden]``.
        ids: ``[num_tokens, top_k]`` int64.
        weights: ``[num_tokens, top_k]`` float32.
    """
    top_k = ids.shape[1]
    order = torch.sort(ids.flatten(), stable=True).indices
    tokens = order // top_k
    counts = torch.bincount(ids.flatten(), minlength=len(experts)).tolist()
    rows = torch.empty((order.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    begin = 0
    for count, expert in zip(counts, experts, strict=True):
        own = slice(begin, begin := begin + count)
        if count:
            rows[own] = _expert(x[tokens[own]], expert)
    placed = torch.empty_like(rows)
    placed[order] = rows
    results = placed.view(*ids.shape, x.shape[1]).float()
    return torch.einsum("tk,tkh->th", weights, results).to(x.dtype)


def _expert(x: Tensor, expert: TorchExpert) -> Tensor:
    gate, up = torch_linear.linear(x, expert.gate_up).chunk(2, dim=-1)
    return torch_linear.linear(functional.silu(gate).mul_(up), expert.down)
