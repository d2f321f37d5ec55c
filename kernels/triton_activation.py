"""Activations in Triton: SiLU or GELU of one half of a row, times the other half; and GELU without a gate."""

# Kernel parameters carry no annotations but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _gelu_tanh(x):
    """tanh by exp, which no GPU lacks; where it overflows, tanh is 1."""
    inner = SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
    tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
    return 0.5 * x * (1.0 + tanh)


@triton.jit
def gate_kernel(
    x_ptr,  # [num_rows, 2 * SIZE], rows x_stride apart
    out_ptr,  # [num_rows, SIZE], contiguous
    x_stride,
    SIZE: tl.constexpr,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    x = x_ptr + row * x_stride + columns
    gate = tl.load(x, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x + SIZE, mask=is_inside, other=0.0).to(tl.float32)
    if IS_GELU:
        activated = _gelu_tanh(gate)
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    out = (activated * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + columns, out, mask=is_inside)


@triton.jit
def gelu_kernel(
    x_ptr,  # [num_rows, SIZE], rows x_stride apart
    out_ptr,  # [num_rows, SIZE], contiguous
    x_stride,
    SIZE: tl.constexpr,
    IS_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    if IS_TANH:
        out = _gelu_tanh(x)
    else:
        out = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    place = out_ptr + row * SIZE + columns
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=is_inside)


def row_launch(size: int) -> dict[str, int]:
    """Constants of a launch over rows of which ``size`` numbers are written."""
    block = min(BLOCK, triton.next_power_of_2(size))
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(4, block // 256))}


def silu_and_mul(x: Tensor) -> Tensor:
    """See :meth:`~.ops.Ops.silu_and_mul`; rows any distance apart."""
    return _gate(x, is_gelu=False)


def gelu_and_mul(x: Tensor) -> Tensor:
    """See :meth:`~.ops.Ops.gelu_and_mul`; rows any distance apart."""
    return _gate(x, is_gelu=True)


def _gate(x: Tensor, is_gelu: bool) -> Tensor:
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        launch = row_launch(size)
        grid = (num_rows, triton.cdiv(size, launch["BLOCK"]))
        gate_kernel[grid](x, out, x.stride(0), IS_GELU=is_gelu, enable_fp_fusion=True, **launch)
    return out


def gelu(x: Tensor, *, is_tanh: bool) -> Tensor:
    """See :meth:`~.ops.Ops.gelu`; rows any distance apart."""
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        launch = row_launch(size)
        grid = (num_rows, triton.cdiv(size, launch["BLOCK"]))
        gelu_kernel[grid](x, out, x.stride(0), IS_TANH=is_tanh, enable_fp_fusion=True, **launch)
    return out
