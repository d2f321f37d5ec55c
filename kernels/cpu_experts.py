"""Experts packed for the native products: one weight of :mod:`.cpu_linear` behind the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .cpu_linear import PackedWeight, Room
from .huge_pages import empty_bytes

_ALIGNMENT = 64  # of each weight
_UNLIKE = "experts of one layer must be of one shape and type, without biases"
Weight = TypeVar("Weight")


class PackedExperts(NamedTuple):
    """One layer's experts, ready for this processor."""

    gate_up: PackedWeight  # of one expert, but for its data: [num_experts, bytes of one] uint8
    down: PackedWeight  # likewise
    num_experts: int


def stack_packed(
    weights: Iterable[Weight], pack: Callable[[Weight, Room], PackedWeight], num_experts: int
) -> PackedWeight:
    """Weights of one shape and kind in one tensor, its rows the weights' data.

    Args:
        pack: packs a weight in the room that it is given.

    Raises:
        ValueError: they are not alike, or not as many.
    """
    rooms = _Rooms(num_experts)
    first: PackedWeight | None = None
    for weight in weights:
        packed = pack(weight, rooms.take)
        first = packed if first is None else first
        if _description(packed) != _description(first) or packed.bias is not None:
            raise ValueError(_UNLIKE)
    if first is None or rooms.num_taken != num_experts:
        raise ValueError(f"{rooms.num_taken} experts where {num_experts} were to come")
    return first._replace(data=rooms.data)


class _Rooms:
    """A room for each expert's weight, taken from the memory of weights with the first."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self.num_taken = 0
        self.data = torch.empty(0)  # [num_experts, bytes of one] uint8

    def take(self, size: int) -> Tensor:
        if self.num_taken == 0:
            padded = -(-size // _ALIGNMENT) * _ALIGNMENT
            self.data = empty_bytes(self._num_experts * padded).view(self._num_experts, padded)
        index, self.num_taken = self.num_taken, self.num_taken + 1
        if index == self._num_experts:
            raise ValueError(f"{index + 1} experts where {index} were to come")
        if size > self.data.shape[1]:
            raise ValueError(_UNLIKE)
        return self.data[index, :size]


def _description(weight: PackedWeight) -> tuple[object, ...]:
    return (weight.kind, weight.out_features, weight.in_features, weight.row_kind)
