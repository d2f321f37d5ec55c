"""The compiler's door: what it reports of a kernel is what the compiled object says."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from octavo.kernels.triton_aot import CompiledLaunch, compile_launches
from octavo.kernels.triton_gpu import ARCHITECTURES, architecture_for


@triton.jit  # type: ignore[untyped-decorator]
def _double(x_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < count), mask=at < count)


def _compile(arch: str, **options: int) -> CompiledLaunch:
    def launch() -> None:
        x = torch.empty(1000, device="meta")
        _double[(4,)](x, x, 1000, BLOCK=256, **options)

    (compiled,) = compile_launches(ARCHITECTURES[arch], launch)
    return compiled


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_launch_is_compiled_and_described(arch: str) -> None:
    compiled = _compile(arch, num_warps=2)
    assert (compiled.kernel, compiled.grid) == ("_double", (4,))
    assert compiled.constants == {"BLOCK": 256}
    assert compiled.num_warps == 2
    assert 1 <= compiled.num_registers <= 64
    assert compiled.num_spilled == compiled.shared_bytes == 0
    assert 0 < compiled.occupancy <= 1


def test_spills_are_seen() -> None:
    assert _compile("sm_90", num_warps=1, maxnreg=64).num_spilled == 0

    @triton.jit  # type: ignore[untyped-decorator]
    def sort(x_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(x_ptr + at, tl.sort(tl.load(x_ptr + at)))

    def launch() -> None:
        sort[(1,)](torch.empty(512, device="meta"), SIZE=512, num_warps=1, maxnreg=24)

    (compiled,) = compile_launches(ARCHITECTURES["sm_90"], launch)
    assert compiled.num_spilled > 0
    assert compiled.num_registers <= 24


def test_gpus_find_their_limits() -> None:
    assert architecture_for("sm_90") is ARCHITECTURES["sm_90"]
    assert architecture_for("sm_86") is ARCHITECTURES["sm_89"]
    assert architecture_for("sm_87") is ARCHITECTURES["sm_80"]
    assert architecture_for("sm_103") is ARCHITECTURES["sm_100"]
    assert architecture_for("sm_120") is ARCHITECTURES["sm_89"]
    for name in ("sm_75", "gfx90a", "gfx1100"):
        with pytest.raises(ValueError, match=f"not made for {name}"):
            architecture_for(name)
