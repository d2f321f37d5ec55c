"""Blocks of GGUF tensors as blocks that products take, which stand for the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checkpoint.gguf_file import BLOCK_LAYOUTS
from ..checkpoint.memory_blocks import BLOCK_BYTES, BLOCK_NUMBERS
from .dequantize import CHUNK_NUMBERS
from .k_quants import SCALED, Scaled, iq4_nl_numbers, q5_0_numbers


def reblock(data: Tensor, type: str, memory_type: str) -> Tensor:
    """The same numbers in other blocks.

    Args:
        data: ``[num_bytes]`` uint8, blocks of ``type``.
        memory_type: one of ``KEPT_AS[type]``.

    Returns:
        ``[num_blocks, BLOCK_BYTES[memory_type]]`` uint8; ``data`` itself if it is of that type.
    """
    if type == memory_type:
        return data.view(-1, BLOCK_BYTES[type])
    numbers, block_bytes = BLOCK_LAYOUTS[type]
    blocks, ratio = data.view(-1, block_bytes), numbers // BLOCK_NUMBERS
    result = torch.empty(blocks.shape[0] * ratio, BLOCK_BYTES[memory_type], dtype=torch.uint8)
    step = CHUNK_NUMBERS // numbers
    for start in range(0, blocks.shape[0], step):
        room = result[start * ratio : (start + step) * ratio]
        _fill(room, blocks[start : start + step], type, memory_type)
    return result


def _fill(room: Tensor, blocks: Tensor, type: str, memory_type: str) -> None:
    if memory_type == "Q8_0":
        room[:, :2] = blocks[:, :2]
        room[:, 2:] = _AS_Q8_0[type](blocks).view(torch.uint8)
    elif memory_type == "Q4_F32":
        _fill_q4_f32(room, SCALED[type](blocks))
    else:
        _fill_q8_f32(room, SCALED[type](blocks))


def _fill_q4_f32(room: Tensor, scaled: Scaled) -> None:
    """``room [num_blocks, 24]``: scale, offset, 32 numbers of 4 bits in Q4_1's order."""
    assert scaled.offsets is not None
    numbers = scaled.numbers.view(-1, BLOCK_NUMBERS).view(torch.uint8)
    room[:, :4] = scaled.scales.view(-1, 1).view(torch.uint8)
    room[:, 4:8] = scaled.offsets.view(-1, 1).view(torch.uint8)
    room[:, 8:] = numbers[:, :16] | numbers[:, 16:] << 4


def _fill_q8_f32(room: Tensor, scaled: Scaled) -> None:
    """``room [num_blocks, 44]``: scales of 16 numbers each, offset, 32 signed bytes."""
    num_blocks = room.shape[0]
    factors = torch.zeros(num_blocks, 3)
    factors[:, :2] = scaled.scales.view(num_blocks, -1)  # one for 32 numbers is that of both halves
    if scaled.offsets is not None:
        factors[:, 2:] = scaled.offsets.view(num_blocks, 1)
    room[:, :12] = factors.view(torch.uint8)
    room[:, 12:] = scaled.numbers.view(num_blocks, BLOCK_NUMBERS).view(torch.uint8)


_AS_Q8_0: dict[str, Callable[[Tensor], Tensor]] = {
    "Q5_0": q5_0_numbers,
    "IQ4_NL": iq4_nl_numbers,
}
"""Types whose numbers are whole, of 8 bits, times one scale for 32 of them: Q8_0 holds them exactly."""
