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
from .triton_device import usable_gpu

BACKENDS = ("auto", "triton", "cpu", "torch", "reference")

logger = logging.getLogger(__name__)


def select_ops(
    backend: str,
    device: torch.device,
    cache_dir: Path | None = None,
    *,
    rounds_activations: bool = False,
) -> Ops:
    """The op set for ``backend``, one of :data:`BACKENDS`, on ``device``.

    ``auto`` is the fastest set that works on the device: Triton's on a GPU, on a CPU the native one, which is
    compiled at first use; torch's where there is no Triton, no compiler or an old GPU, and then one line
    says so.

    Args:
        cache_dir: where compiled CPU kernels are kept; None: in the user's cache folder.
        rounds_activations: for :class:`~.cpu_ops.CpuOps`; the others have no use for it.

    Raises:
        ValueError: there is no such back end, or it does not work here; the message says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"No attention backend {backend!r}; there are {', '.join(BACKENDS)}.")
    if backend == "reference":
        return ReferenceOps()
    if backend == "torch":
        return TorchOps()
    if backend == "triton" or (backend == "auto" and device.type != "cpu"):
        return _triton_ops(device, is_asked_for=backend == "triton")
    return _cpu_ops(device, cache_dir, rounds_activations, is_asked_for=backend == "cpu")


def _triton_ops(device: torch.device, is_asked_for: bool) -> Ops:
    try:
        gpu = usable_gpu(device)
        from .triton_ops import TritonOps  # brings in Triton, which a CPU's start does without

        ops = TritonOps(device, gpu)
        ops.check()
    except ValueError as reason:
        if is_asked_for:
            raise ValueError(f"The Triton kernels cannot be used: {reason}.") from reason
        logger.warning("The Triton kernels cannot be used: %s. PyTorch computes instead.", reason)
        return TorchOps()
    if gpu.arch.is_amd:
        logger.warning("The Triton kernels compile for AMD GPUs and are untested on them.")
    return ops


def _cpu_ops(
    device: torch.device, cache_dir: Path | None, rounds_activations: bool, is_asked_for: bool
) -> Ops:
    if device.type != "cpu":
        raise ValueError(f"The cpu kernels do not run on {device}.")
    native = load_library(cache_dir=cache_dir)
    if native.library is not None:
        logger.info("native kernels %s", native.detail)
        return CpuOps(native.library, rounds_activations=rounds_activations)
    if is_asked_for:
        raise ValueError(f"The native kernels cannot be used: {native.detail}")
    logger.warning(
        "The native kernels cannot be used (%s). PyTorch computes instead, several times slower; a C++ "
        "compiler (g++ or clang++) mends that.",
        native.detail,
    )
    return TorchOps()
