"""RMS norm and layer norm in Triton, with the residual's addition in the same pass over memory.

One program a row, which stays in registers; rows of any length by masks. Rounds where the oracle does: the
sum once to its type, the result once to its own.
"""

# Kernel parameters carry no annotations but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SIZE = 1 << 16
"""Longest row: one program holds it whole."""


@triton.jit
def norm_kernel(
    x_ptr,  # [num_rows, SIZE], rows x_stride apart
    residual_ptr,  # [num_rows, SIZE], rows residual_stride apart, overwritten; as HAS_RESIDUAL
    weight_ptr,  # [SIZE]
    bias_ptr,  # [SIZE]; as HAS_BIAS
    out_ptr,  # [num_rows, SIZE], contiguous
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CENTRED: tl.constexpr,  # layer norm: less the mean
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual_ptr + row * residual_stride + columns
        before = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
        total = (x + before).to(residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=is_inside)
        x = total.to(tl.float32)
    if IS_CENTRED:
        x = tl.where(is_inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    out = x * scale * weight
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def norm_heads_kernel(
    heads_ptr,  # [num_tokens, num_heads, SIZE], overwritten
    weight_ptr,  # [SIZE]
    token_stride,
    head_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    row = tl.program_id(0).to(tl.int64) * token_stride + tl.program_id(1) * head_stride
    x = tl.load(heads_ptr + row + columns, mask=is_inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    out = (x * scale * weight).to(heads_ptr.dtype.element_ty)
    tl.store(heads_ptr + row + columns, out, mask=is_inside)


def norm_launch(size: int) -> dict[str, int]:
    """Constants of a launch over rows of ``size`` numbers."""
    block = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :meth:`~.ops.Ops.rms_norm`; ``x [num_rows, size]``, rows any distance apart."""
    return _norm(x, None, weight, None, eps, is_centred=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :meth:`~.ops.Ops.add_rms_norm`; ``residual [num_rows, size]`` is overwritten."""
    return _norm(x, residual, weight, None, eps, is_centred=False), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See :meth:`~.ops.Ops.layer_norm`; ``x [num_rows, size]``, rows any distance apart."""
    return _norm(x, None, weight, bias, eps, is_centred=True)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See :meth:`~.ops.Ops.add_layer_norm`; ``residual [num_rows, size]`` is overwritten."""
    return _norm(x, residual, weight, bias, eps, is_centred=True), residual


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    is_centred: bool,
) -> Tensor:
    num_rows, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"a norm over {size} numbers; the Triton kernel holds {MAX_SIZE}")
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        norm_kernel[(num_rows,)](
            x,
            residual,
            weight,
            bias,
            out,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            IS_CENTRED=is_centred,
            enable_fp_fusion=True,
            **norm_launch(size),
        )
    return out


def norm_heads(heads: Tensor, weight: Tensor, eps: float) -> None:
    """RMS norm of ``heads [num_tokens, num_heads, head_dim]`` in place; see :meth:`~.ops.Ops.qk_norm`."""
    num_tokens, num_heads, head_dim = heads.shape
    is_whole = len(weight) == num_heads * head_dim
    if not (is_whole and heads.stride(1) == head_dim) and len(weight) != head_dim:
        raise ValueError(f"a norm of {len(weight)} for {num_heads} heads of {head_dim}")
    if len(weight) > MAX_SIZE:
        raise ValueError(f"a norm over {len(weight)} numbers; the Triton kernel holds {MAX_SIZE}")
    if num_tokens:
        norm_heads_kernel[(num_tokens, 1 if is_whole else num_heads)](
            heads,
            weight,
            heads.stride(0),
            heads.stride(1),
            eps,
            enable_fp_fusion=True,
            **norm_launch(len(weight)),
        )
