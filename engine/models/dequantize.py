"""Bytes of GGUF tensors to numbers. Layouts as in ggml's ``block_q4_0`` and its kin."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checkpoint.gguf_file import BLOCK_LAYOUTS

CHUNK_NUMBERS = 1 << 14
"""Numbers widened to float32 at a time. Chunks stay in the cache and below the size at which torch
starts its threads, whose barriers cost more than they save on a busy machine."""

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
        return data.view(_FLOATS[type]).to(dtype, copy=True)
    numbers, block_bytes = BLOCK_LAYOUTS[type]
    blocks = data.view(-1, block_bytes)
    values = torch.empty(blocks.shape[0], numbers, dtype=dtype)
    step = CHUNK_NUMBERS // numbers
    for start in range(0, blocks.shape[0], step):
        values[start : start + step] = _BLOCKS[type](blocks[start : start + step])
    return values.view(-1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, ``[num_blocks, 1]`` float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """``[num_blocks, 16]`` bytes → ``[num_blocks, 32]`` float32: low halves, then high halves."""
    values = torch.empty(packed.shape[0], 32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


def _q4_0(blocks: Tensor) -> Tensor:
    """18 bytes: scale, 32 numbers of 4 bits around 8."""
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """20 bytes: scale, minimum, 32 numbers of 4 bits."""
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    """34 bytes: scale, 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
QUANTIZED_TYPES = frozenset(_BLOCKS)
