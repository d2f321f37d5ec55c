"""Chooses the op set, once, at start-up."""

from __future__ import annotations

import torch

from .ops import Ops
from .reference import ReferenceOps
from .torch_ops import TorchOps

BACKENDS = ("auto", "torch", "reference")


def select_ops(backend: str, device: torch.device) -> Ops:
    """The op set for ``backend``, one of :data:`BACKENDS`, on ``device``.

    ``auto`` is the fastest set that works on the device.

    Raises:
        ValueError: there is no such back end.
    """
    if backend in ("auto", "torch"):
        return TorchOps()
    if backend == "reference":
        return ReferenceOps()
    raise ValueError(f"No attention backend {backend!r}; there are {', '.join(BACKENDS)}.")
