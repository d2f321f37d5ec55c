"""Products of tiles in Triton, as every kernel here takes them."""

# Kernel parameters carry no annotations but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

WIDEN_PRODUCTS = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies bfloat16 as the integers that hold their bits."""


@triton.jit
def product(a, b, acc=None):
    """``acc + a @ b`` in float32: float32 is not rounded to TF32."""
    if WIDEN_PRODUCTS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
