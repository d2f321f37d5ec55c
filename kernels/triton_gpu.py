"""What kernels must know of the GPU that they are launched on. Triton is not imported here.

Passed to every launcher, so that the same launcher compiles for a GPU that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Architecture:
    """Limits of one kind of GPU. Memory in bytes."""

    name: str  # "sm_90", "gfx942"
    shared_bytes: int  # shared memory that one program may have
    shared_bytes_per_sm: int
    reserved_shared_bytes: int  # taken from an SM's shared memory for every program
    num_registers_per_sm: int  # 32-bit ones
    max_registers: int  # of one thread; more are spilled
    max_warps_per_sm: int
    max_programs_per_sm: int
    warp_size: int
    converts_fp8: bool  # e4m3 ↔ wider floats in hardware

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")


_KIB = 1024

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD Instinct MI300 instruction set
# architecture, "Program organization". A wavefront's registers of both kinds (vector and accumulation) are counted.
ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", 163 * _KIB, 164 * _KIB, _KIB, 65536, 255, 64, 32, 32, False),
        Architecture("sm_89", 99 * _KIB, 100 * _KIB, _KIB, 65536, 255, 48, 24, 32, True),
        Architecture("sm_90", 227 * _KIB, 228 * _KIB, _KIB, 65536, 255, 64, 32, 32, True),
        Architecture("sm_100", 227 * _KIB, 228 * _KIB, _KIB, 65536, 255, 64, 32, 32, True),
        Architecture("gfx942", 64 * _KIB, 64 * _KIB, 0, 131072, 512, 32, 16, 64, False),
    )
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, or the description of one."""

    arch: Architecture
    num_sms: int


def architecture_for(name: str) -> Architecture:
    """The architecture whose limits hold for ``name``: itself, or the newest known one that is not newer.

    Raises:
        ValueError: the GPU is older than all that the kernels are made for.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name == "sm_86":
        return ARCHITECTURES["sm_89"]  # the same shared memory
    older = [arch for known, arch in ARCHITECTURES.items() if _number(known) <= _number(name)]
    if not name.startswith("sm_") or not older:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"The Triton kernels are not made for {name}; they are for {known}.")
    if _number(name) >= 120:
        return ARCHITECTURES["sm_89"]  # consumer cards have 99 KiB of shared memory a program
    return max(older, key=lambda arch: _number(arch.name))


def _number(name: str) -> int:
    return int(name[3:]) if name.startswith("sm_") else 1 << 30


def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind ``device``.

    Raises:
        ValueError: the kernels are not made for it.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = str(properties.gcnArchName).split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    return Gpu(architecture_for(name), properties.multi_processor_count)
