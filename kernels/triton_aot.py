"""Compiles kernels for GPUs that are not there, from the launches that real code makes.

A launcher is called with tensors on the ``meta`` device; every ``kernel[grid](...)`` in it goes through
Triton's own specialisation of arguments and compiles, and nothing is launched. Registers, spills and shared
memory are then read from the compiled object. Not for serving: tests, the tile table and docs use it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .triton_gpu import Architecture


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    """What one launch needs of the GPU."""

    kernel: str
    arch: Architecture
    grid: tuple[int, ...]
    constants: dict[str, Any]  # constexpr arguments by name
    num_warps: int
    num_stages: int
    num_registers: int  # of a thread
    num_spilled: int  # bytes of memory that a thread keeps registers in
    shared_bytes: int

    @property
    def programs_per_sm(self) -> int:
        """How many of these programs an SM holds at a time."""
        arch = self.arch
        granule = 8  # registers are given to a warp in units of 8 a thread
        per_thread = -(-max(self.num_registers, 1) // granule) * granule
        by_registers = arch.num_registers_per_sm // (per_thread * arch.warp_size * self.num_warps)
        shared = self.shared_bytes + arch.reserved_shared_bytes
        by_shared = arch.shared_bytes_per_sm // shared if shared else arch.max_programs_per_sm
        by_warps = arch.max_warps_per_sm // self.num_warps
        return min(by_registers, by_shared, by_warps, arch.max_programs_per_sm)

    @property
    def occupancy(self) -> float:
        """Share of an SM's warps that these programs fill."""
        return self.programs_per_sm * self.num_warps / self.arch.max_warps_per_sm


def compile_launches(arch: Architecture, call: Callable[[], object]) -> list[CompiledLaunch]:
    """Compile every kernel that ``call`` launches, for ``arch``.

    Raises:
        RuntimeError: kernels are interpreted in this process (``TRITON_INTERPRET=1``).
        Exception: whatever Triton's compiler says.
    """
    launches: list[_Launch] = []
    with _recorded(arch, launches):
        call()
    return [_read(arch, launch) for launch in launches]


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    constants: dict[str, Any]


@contextmanager
def _recorded(arch: Architecture, launches: list[_Launch]) -> Iterator[None]:
    """Within, launches compile for ``arch`` and are noted instead of run."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled")
    run, before = JITFunction.run, driver._active

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        names = [param.name for param in self.params]
        bound = dict(zip(names, args, strict=False)) | kwargs
        constants = {param.name: bound[param.name] for param in self.params if param.is_constexpr}
        where = grid(bound) if callable(grid) else grid
        launches.append(_Launch(self, compiled, tuple(where), constants))
        return compiled

    JITFunction.run = note
    driver.set_active(_AbsentDriver(arch))
    try:
        yield
    finally:
        JITFunction.run = run
        driver.set_active(before)


class _AbsentDriver:
    """As much of a driver as compiling needs. Its device is its architecture's name."""

    def __init__(self, arch: Architecture) -> None:
        kind, name = ("hip", arch.name) if arch.is_amd else ("cuda", int(arch.name[3:]))
        self._target = GPUTarget(kind, name, arch.warp_size)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target.arch)

    def get_current_stream(self, device: str) -> int:
        return 0


def _read(arch: Architecture, launch: _Launch) -> CompiledLaunch:
    compiled = launch.compiled
    num_registers, num_spilled = (_read_amdgcn if arch.is_amd else _read_cubin)(compiled.asm)
    return CompiledLaunch(
        kernel=launch.kernel.fn.__name__,
        arch=arch,
        grid=launch.grid,
        constants=launch.constants,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        num_registers=num_registers,
        num_spilled=num_spilled,
        shared_bytes=compiled.metadata.shared,
    )


def _read_cubin(asm: Any) -> tuple[int, int]:
    """Registers, and bytes of local memory, as the toolkit's reader finds them in the object."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(_only(rf"{word}:(\d+)", text)) for word in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def _read_amdgcn(asm: Any) -> tuple[int, int]:
    """Vector and accumulation registers, and bytes of scratch memory, from the assembler's notes.

    Scalar registers that do not suffice are kept in lanes of vector registers: no memory is touched.
    """
    text = asm["amdgcn"]
    registers = _only(r"\.vgpr_count:\s+(\d+)", text)
    return int(registers), int(_only(r"\.private_segment_fixed_size:\s+(\d+)", text))


def _only(pattern: str, text: str) -> str:
    found = set(re.findall(pattern, text))
    if len(found) != 1:
        raise ValueError(f"{pattern!r} is found {len(found)} times in the compiler's output")
    return str(found.pop())
