"""Chooses the op set, once, at start-up."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from .cpu_build import load_library
from .cpu_ops import CpuOps
from .ops import Ops
from .reference import ReferenceOps
from .torch_ops import TorchOps

BACKENDS = ("auto", "cpu", "torch", "reference")

logger = logging.getLogger(__name__)


def select_ops(backend: str, device: torch.device, cache_dir: Path | None = None) -> Ops:
    """The op set for ``backend``, one of :data:`BACKENDS`, on ``device``.

    ``auto`` is the fastest set that works on the device: on a CPU the native one, which is compiled at first
    use, or torch's where there is no compiler.

    Args:
        cache_dir: where compiled kernels are kept; None: in the user's cache folder.

    Raises:
        ValueError: there is no such back end, or it does not work here; the message says why.
    """
    if backend == "reference":
        return ReferenceOps()
    if backend == "torch" or (backend == "auto" and device.type != "cpu"):
        return TorchOps()
    if backend not in BACKENDS:
        raise ValueError(f"No attention backend {backend!r}; there are {', '.join(BACKENDS)}.")
    if device.type != "cpu":
        raise ValueError(f"The cpu kernels do not run on {device}.")
    native = load_library(cache_dir=cache_dir)
    if native.library is not None:
        logger.info("native kernels %s", native.detail)
        return CpuOps(native.library)
    if backend == "cpu":
        raise ValueError(f"The native kernels cannot be used: {native.detail}")
    logger.warning(
        "The native kernels cannot be used (%s). PyTorch computes instead, several times slower; a C++ "
        "compiler (g++ or clang++) mends that.",
        native.detail,
    )
    return TorchOps()
