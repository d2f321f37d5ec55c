"""Numbers of ggml's K-quants and of its small cousins with a fifth bit or a table.

Each function takes ``blocks``, ``[num_blocks, block_bytes]`` uint8, and gives ``[num_blocks, numbers]``
float32, computed in the order in which ggml does, so that the results are equal bit for bit. Layouts as
in ggml's ``block_q4_K`` and its kin.
"""

from __future__ import annotations

import torch
from torch import Tensor

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, ``[num_blocks, 1]`` float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def fields(packed: Tensor, bits: int) -> Tensor:
    """``[..., n]`` bytes → ``[..., 8 / bits, n]``: the lowest bits of all bytes, then the next."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-2)


def q5_0(blocks: Tensor) -> Tensor:
    """22 bytes: scale, 32 fifth bits, 32 numbers of 4 bits; around 16."""
    return q5_0_numbers(blocks).float().mul_(half(blocks, 0))


def q5_0_numbers(blocks: Tensor) -> Tensor:
    """The stored numbers, ``[num_blocks, 32]`` int8."""
    return (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16).view(torch.int8)


def q5_1(blocks: Tensor) -> Tensor:
    """24 bytes: scale, minimum, 32 fifth bits, 32 numbers of 4 bits."""
    numbers = _five_bits(blocks[:, 4:8], blocks[:, 8:]).float()
    return numbers.mul_(half(blocks, 0)).add_(half(blocks, 2))


def iq4_nl(blocks: Tensor) -> Tensor:
    """18 bytes: scale, 32 places of 4 bits in a table."""
    return iq4_nl_numbers(blocks).float().mul_(half(blocks, 0))


def iq4_nl_numbers(blocks: Tensor) -> Tensor:
    """The numbers that the table gives, ``[num_blocks, 32]`` int8."""
    return _iq4_values(blocks[:, 2:]).flatten(1)


def iq4_xs(blocks: Tensor) -> Tensor:
    """136 bytes: scale, 8 scales of 6 bits (high bits first), 256 places in IQ4_NL's table."""
    high = fields(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = fields(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    scales = _centred(low | high << 4, 32) * half(blocks, 0)
    numbers = _iq4_values(blocks[:, 8:].view(-1, 8, 16)).flatten(2)
    return numbers.float().mul_(scales.unsqueeze(2)).flatten(1)


def q2_k(blocks: Tensor) -> Tensor:
    """84 bytes: 16 pairs of 4 bits that scale and shift 16 numbers, 256 numbers of 2 bits, two scales."""
    scales = (blocks[:, :16] & 15).float() * half(blocks, 80)
    minima = (blocks[:, :16] >> 4).float() * half(blocks, 82)
    numbers = fields(blocks[:, 16:80].view(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    return numbers.mul_(scales.unsqueeze(2)).sub_(minima.unsqueeze(2)).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    """110 bytes: 256 third bits, 256 numbers of 2 bits, 16 scales of 6 bits, scale.

    A third bit that is not set takes 4 away.
    """
    low = fields(blocks[:, 96:104], 4).flatten(1)
    high = fields(blocks[:, 104:108], 2).flatten(1)
    scales = _centred(low | high << 4, 32) * half(blocks, 108)
    pairs = fields(blocks[:, 32:96].view(-1, 2, 32), 2).reshape(-1, 16, 16)
    thirds = fields(blocks[:, :32], 1).reshape(-1, 16, 16)
    return _centred(pairs | thirds << 2, 4).mul_(scales.unsqueeze(2)).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    """144 bytes: two scales, 8 pairs of 6 bits that scale and shift 32 numbers, 256 numbers of 4 bits."""
    return _scaled_and_shifted(blocks, _nibble_rows(blocks[:, 16:], 32))


def q5_k(blocks: Tensor) -> Tensor:
    """176 bytes: as Q4_K, with 256 fifth bits before the numbers."""
    return _scaled_and_shifted(
        blocks, _nibble_rows(blocks[:, 48:], 32) | fields(blocks[:, 16:48], 1) << 4
    )


def q6_k(blocks: Tensor) -> Tensor:
    """210 bytes: 256 numbers of 4 bits, their upper 2 bits, 16 signed scales, scale; around 32."""
    low = _nibble_rows(blocks[:, :128], 64).view(-1, 16, 16)
    high = fields(blocks[:, 128:192].view(-1, 2, 32), 2).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float() * half(blocks, 208)
    return _centred(low | high << 4, 32).mul_(scales.unsqueeze(2)).flatten(1)


def _five_bits(fifth: Tensor, packed: Tensor) -> Tensor:
    """``[num_blocks, 4]`` bits and ``[num_blocks, 16]`` bytes → ``[num_blocks, 32]`` uint8."""
    bits = _SIXTEENS[fifth.int()].view(torch.uint8).flatten(1)
    return bits.bitwise_or_(fields(packed, 4).flatten(1))


def _nibble_rows(packed: Tensor, width: int) -> Tensor:
    """Each ``width`` bytes' low halves, then their high halves, as ``[num_blocks, 8, 32]`` uint8."""
    return fields(packed.view(packed.shape[0], -1, width), 4).reshape(-1, 8, 32)


def _scaled_and_shifted(blocks: Tensor, numbers: Tensor) -> Tensor:
    """``numbers [num_blocks, 8, 32]`` by the 12 bytes in which Q4_K and Q5_K pack what scales them."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 2) & 48], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | (second >> 2) & 48], dim=1)
    scales, minima = scales.float() * half(blocks, 0), minima.float() * half(blocks, 2)
    return numbers.float().mul_(scales.unsqueeze(2)).sub_(minima.unsqueeze(2)).flatten(1)


def _centred(numbers: Tensor, middle: int) -> Tensor:
    """Small unsigned numbers around ``middle`` as float32 around zero."""
    return numbers.float().sub_(middle)


def _iq4_values(places: Tensor) -> Tensor:
    """``[..., 16]`` bytes → ``[..., 2, 16]`` int8: of the low halves, then of the high halves."""
    pairs = _IQ4_PAIRS[places.int()].view(torch.int8).view(*places.shape, 2)
    return pairs.transpose(-1, -2)


_BYTES = torch.arange(256, dtype=torch.uint8)
_SIXTEENS = (fields(_BYTES, 1).T << 4).contiguous().view(torch.int64).flatten()
"""``[256]``: for each byte 8 bytes that are 16 where its bit is set, the lowest bit first."""

_IQ4_PAIRS = (
    torch.tensor(_IQ4_VALUES, dtype=torch.int8)[fields(_BYTES, 4).int()]
    .T.contiguous()
    .view(torch.int16)
    .flatten()
)
"""``[256]``: for each byte the values of its low and its high half."""
