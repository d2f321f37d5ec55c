"""Which GPU Triton's kernels would run on, and what it offers them; or why they cannot run."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util

import torch

from .triton_gpu import ARCHITECTURES, Gpu, gpu_of

LEAST_CAPABILITY = (8, 0)
"""The first with bfloat16 and asynchronous copies."""
INTERPRETED = Gpu(ARCHITECTURES["sm_90"], num_sms=4)
"""Whose configurations the interpreter runs."""
_CAN_USE_HOST_POINTER = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, from cuda.h."""


def usable_gpu(device: torch.device) -> Gpu:
    """The GPU behind ``device``; behind the CPU :data:`INTERPRETED`, where kernels are interpreted.

    Raises:
        ValueError: the kernels cannot run on it; the message says why.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError("Triton is not installed (pip install triton)")
    try:
        triton = importlib.import_module("triton")
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(f"Triton cannot be imported ({error})") from error
    if device.type == "cpu":
        if triton.knobs.runtime.interpret:
            return INTERPRETED
        raise ValueError("they need a GPU, and the device is the CPU")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"PyTorch has no GPU for {device}")
    if not torch.version.hip:
        _check_capability(device)
    return gpu_of(device)


def _check_capability(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        has, needs = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        raise ValueError(f"{name} has compute capability {has}, and they need {needs}")


def reads_registered_memory(device: torch.device) -> bool:
    """Whether kernels may use pinned host memory by its own address, as NVIDIA's usually may."""
    if device.type != "cuda" or torch.version.hip:
        return False
    index: int | None = device.index
    ordinal = torch.cuda.current_device() if index is None else index
    value = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuDeviceGetAttribute(ctypes.byref(value), _CAN_USE_HOST_POINTER, ordinal)
    except (OSError, AttributeError):
        return False
    return bool(error == 0 and value.value == 1)
