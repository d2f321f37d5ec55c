"""Whether Triton's kernels run on a device, and what the device offers them."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util

import torch

LEAST_CAPABILITY = (8, 0)
"""The first with bfloat16 and asynchronous copies."""
_CAN_USE_HOST_POINTER = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, from cuda.h."""


def why_not(device: torch.device) -> str | None:
    """Why the kernels cannot run on ``device``; ``None`` if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if device.type == "cpu":
        failure = _import_error()
        if failure is None and not _is_interpreting():
            failure = "they need a GPU, and the device is the CPU"
        return failure
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"PyTorch has no GPU for {device}"
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            has, needs = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
            return f"{name} has compute capability {has}, and they need {needs}"
    return _import_error()


def _import_error() -> str | None:
    try:
        importlib.import_module("triton")
    except (ImportError, OSError, RuntimeError) as error:
        return f"Triton cannot be imported ({error})"
    return None


def _is_interpreting() -> bool:
    """Whether this process interprets kernels on the CPU, which Triton reads from TRITON_INTERPRET."""
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def reads_registered_memory(device: torch.device) -> bool:
    """Whether kernels may use pinned host memory by its own address, as NVIDIA's usually may."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    value = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuDeviceGetAttribute(
            ctypes.byref(value), _CAN_USE_HOST_POINTER, _ordinal(device)
        )
    except (OSError, AttributeError):
        return False
    return error == 0 and value.value == 1


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
