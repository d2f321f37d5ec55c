"""Experts packed for the native products: one weight of :mod:`.cpu_linear` behind the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .cpu_linear import PackedWeight
from .huge_pages import empty_bytes

_ALIGNMENT = 64  # of each weight


class PackedExperts(NamedTuple):
    """One layer's experts, ready for this processor."""

    gate_up: PackedWeight  # of one expert, but for its data: [num_experts, bytes of one] uint8
    down: PackedWeight  # likewise
    num_experts: int


def stack_packed(weights: Iterable[PackedWeight], num_experts: int) -> PackedWeight:
    """Weights of one shape and kind in one tensor, its rows the weights' data.

    Raises:
        ValueError: they are not alike, or not as many.
    """
    first: PackedWeight | None = None
    data = torch.empty(0)
    count = 0
    for count, weight in enumerate(weights, start=1):
        if first is None:
            first, data = weight, _room_for(weight, num_experts)
        if _description(weight) != _description(first) or weight.bias is not None:
            raise ValueError("experts of one layer must be of one shape and type, without biases")
        if count <= num_experts:
            data[count - 1, : weight.data.shape[0]] = weight.data
    if first is None or count != num_experts:
        raise ValueError(f"{count} experts where {num_experts} were to come")
    return first._replace(data=data)


def _room_for(weight: PackedWeight, num_experts: int) -> Tensor:
    size = -(-weight.data.shape[0] // _ALIGNMENT) * _ALIGNMENT
    return empty_bytes(num_experts * size).view(num_experts, size)


def _description(weight: PackedWeight) -> tuple[object, ...]:
    return (weight.kind, weight.out_features, weight.in_features, weight.row_kind)
