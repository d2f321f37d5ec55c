"""The card itself: what it is, how fast it copies and multiplies. Everything else is held against this."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch
import triton

from .common import Machine, Row, seconds_of


def run(machine: Machine) -> Iterator[Row]:
    num_bytes, size = (1 << 20, 64) if machine.is_dry else (2 << 30, 8192)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), machine, 0.5)
    a, b = (torch.randn(size, size, device=machine.device).bfloat16() for _ in range(2))
    matrix_s = seconds_of(lambda: a @ b, machine, 0.5)
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    yield {"name": "card", "note": f"{_name(machine)}; {versions}"}
    yield {"name": "copy bandwidth", "value": 2 * num_bytes / copy_s / 1e9, "unit": "GB/s"}
    yield {"name": "bfloat16 products", "value": 2 * size**3 / matrix_s / 1e12, "unit": "TFLOP/s"}


def _name(machine: Machine) -> str:
    if machine.is_dry:
        return "CPU, kernels interpreted"
    free, total = torch.cuda.mem_get_info(machine.device)
    name = torch.cuda.get_device_name(machine.device)
    major, minor = torch.cuda.get_device_capability(machine.device)
    return f"{name}, {total / 2**30:.0f} GiB ({free / 2**30:.0f} free), compute capability {major}.{minor}"
