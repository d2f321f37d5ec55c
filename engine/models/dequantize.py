"""Bytes of GGUF tensors to numbers. Layouts as in ggml's ``block_q4_0`` and its kin."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checkpoint.gguf_file import BLOCK_LAYOUTS
from . import k_quants
from .k_quants import SCALED, Scaled, half

CHUNK_NUMBERS = 1 << 15
"""Numbers widened to float32 at a time. Chunks stay in the cache and do not exceed the size up to which
torch works alone: the barriers of its threads cost more than they save on a busy machine."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(data: Tensor, type: str, dtype: torch.dtype) -> Tensor:
    """Numbers of one tensor.

    Args:
        data: ``[num_bytes]`` uint8.
        type: a key of :data:`BLOCK_LAYOUTS`.
        dtype: of the result. Blocks are computed in float32 and rounded once.

    Returns:
        ``[num_numbers]`` of ``dtype``, in memory of its own.
    """
    if type in _FLOATS:
        return as_numbers(data, type).to(dtype, copy=True)
    numbers, block_bytes = BLOCK_LAYOUTS[type]
    blocks = data.view(-1, block_bytes)
    values = torch.empty(blocks.shape[0], numbers, dtype=dtype)
    step = CHUNK_NUMBERS // numbers
    for start in range(0, blocks.shape[0], step):
        values[start : start + step] = _BLOCKS[type](blocks[start : start + step])
    return values.view(-1)


def as_numbers(data: Tensor, type: str) -> Tensor:
    """``data``, ``[num_bytes]`` uint8, as the numbers of a type without blocks that it holds: no copy."""
    return data.view(_FLOATS[type])


def _nibbles(packed: Tensor) -> Tensor:
    """``[num_blocks, 16]`` bytes → ``[num_blocks, 32]`` float32: low halves, then high halves."""
    values = torch.empty(packed.shape[0], 32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


def _q4_0(blocks: Tensor) -> Tensor:
    """18 bytes: scale, 32 numbers of 4 bits around 8."""
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """20 bytes: scale, minimum, 32 numbers of 4 bits."""
    return _nibbles(blocks[:, 4:]).mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    """34 bytes: scale, 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).float().mul_(half(blocks, 0))


def _scaled_values(scaled: Callable[[Tensor], Scaled]) -> Callable[[Tensor], Tensor]:
    return lambda blocks: scaled(blocks).values()


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": k_quants.q5_0,
    "Q8_0": _q8_0,
    "Q2_K": k_quants.q2_k,
    "IQ4_NL": k_quants.iq4_nl,
    **{type: _scaled_values(scaled) for type, scaled in SCALED.items()},
}
QUANTIZED_TYPES = frozenset(_BLOCKS)
