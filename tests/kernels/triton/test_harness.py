"""The interpreter is what runs here."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.smoke


@triton.jit  # type: ignore[untyped-decorator]
def _double(x_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < count), mask=at < count)


def test_a_kernel_runs_on_the_cpu() -> None:
    x, out = torch.randn(100), torch.full((128,), float("nan"))
    _double[(2,)](x, out, 100, BLOCK=64)
    assert torch.equal(out[:100], 2 * x)
    assert out[100:].isnan().all()
