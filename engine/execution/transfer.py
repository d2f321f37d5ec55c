"""A step's numbers on their way to the device and back.

On a GPU everything goes up through pinned memory and is only enqueued; :meth:`Transfer.download` is where a
step waits for the device, once. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16


class Transfer:
    """Between the host and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_asynchronous = device.type == "cuda"
        """Whether asking the device for a number means waiting for everything that it has to do."""

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """The arrays as tensors of the device, by one copy."""
        if not self.is_asynchronous:
            return [torch.from_numpy(array) for array in arrays]
        places, end = [], 0
        for array in arrays:
            places.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        staging = torch.empty(end, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for array, place in zip(arrays, places, strict=True):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            staging.numpy()[place : place + array.nbytes] = raw
        # Torch gives the staging memory out again only when the copy has left it.
        moved = staging.to(self.device, non_blocking=True)
        return [
            moved[place : place + array.nbytes].view(_dtype(array)).view(array.shape)
            for array, place in zip(arrays, places, strict=True)
        ]

    def download(self, *columns: Tensor) -> list[list[int]]:
        """The numbers of one-dimensional integer or bool tensors, by one copy that is waited for."""
        if not self.is_asynchronous or len(columns) == 1:
            return [column.tolist() for column in columns]
        values = torch.cat([column.long() for column in columns]).tolist()
        ends = np.cumsum([len(column) for column in columns]).tolist()
        return [values[end - len(column) : end] for column, end in zip(columns, ends, strict=True)]


def to_device(numbers: NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """A tensor of the device; on a GPU its copy is only enqueued."""
    tensor = torch.from_numpy(np.asarray(numbers))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
