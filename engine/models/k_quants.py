"""Numbers of ggml's K-quants and of its small cousins with a fifth bit or a table.

Each function takes ``blocks``, ``[num_blocks, block_bytes]`` uint8, and gives ``[num_blocks, numbers]``
float32, computed in the order in which ggml does, so that the results are equal bit for bit; or, those in
:data:`SCALED`, what these are computed from. Layouts as in ggml's ``block_q4_K`` and its kin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Scaled(NamedTuple):
    """Whole numbers in groups of 16 or 32, and what makes values of them."""

    numbers: Tensor  # [num_blocks, num_groups, group_size] int8
    scales: Tensor  # [num_blocks, num_groups] float32
    offsets: Tensor | None = (
        None  # likewise; a product of number and scale is exact, so that one rounding is left
    )

    def values(self) -> Tensor:
        """``[num_blocks, numbers]`` float32."""
        values = self.numbers.float().mul_(self.scales.unsqueeze(2))
        if self.offsets is not None:
            values.add_(self.offsets.unsqueeze(2))
        return values.flatten(1)


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


def _q5_1(blocks: Tensor) -> Scaled:
    """24 bytes: scale, minimum, 32 fifth bits, 32 numbers of 4 bits."""
    numbers = _five_bits(blocks[:, 4:8], blocks[:, 8:]).view(torch.int8)
    return Scaled(numbers.unsqueeze(1), half(blocks, 0), half(blocks, 2))


def iq4_nl(blocks: Tensor) -> Tensor:
    """18 bytes: scale, 32 places of 4 bits in a table."""
    return iq4_nl_numbers(blocks).float().mul_(half(blocks, 0))


def iq4_nl_numbers(blocks: Tensor) -> Tensor:
    """The numbers that the table gives, ``[num_blocks, 32]`` int8."""
    return _iq4_values(blocks[:, 2:]).flatten(1)


def _iq4_xs(blocks: Tensor) -> Scaled:
    """136 bytes: scale, 8 scales of 6 bits (high bits first), 256 places in IQ4_NL's table."""
    high = fields(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = fields(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    scales = _centred(low | high << 4, 32) * half(blocks, 0)
    return Scaled(_iq4_values(blocks[:, 8:].view(-1, 8, 16)).flatten(2), scales)


def q2_k(blocks: Tensor) -> Tensor:
    """84 bytes: 16 pairs of 4 bits that scale and shift 16 numbers, 256 numbers of 2 bits, two scales."""
    scales = (blocks[:, :16] & 15).float() * half(blocks, 80)
    minima = (blocks[:, :16] >> 4).float() * half(blocks, 82)
    numbers = fields(blocks[:, 16:80].view(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    return numbers.mul_(scales.unsqueeze(2)).sub_(minima.unsqueeze(2)).flatten(1)


def _q3_k(blocks: Tensor) -> Scaled:
    """110 bytes: 256 third bits, 256 numbers of 2 bits, 16 scales of 6 bits, scale.

    A third bit that is not set takes 4 away.
    """
    low = fields(blocks[:, 96:104], 4).flatten(1)
    high = fields(blocks[:, 104:108], 2).flatten(1)
    scales = _centred(low | high << 4, 32) * half(blocks, 108)
    pairs = fields(blocks[:, 32:96].view(-1, 2, 32), 2).reshape(-1, 16, 16)
    thirds = fields(blocks[:, :32], 1).reshape(-1, 16, 16)
    return Scaled(_centred(pairs | thirds << 2, 4), scales)


def _q4_k(blocks: Tensor) -> Scaled:
    """144 bytes: two scales, 8 pairs of 6 bits that scale and shift 32 numbers, 256 numbers of 4 bits."""
    return _scaled_and_shifted(blocks, _nibble_rows(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Scaled:
    """176 bytes: as Q4_K, with 256 fifth bits before the numbers."""
    return _scaled_and_shifted(
        blocks, _nibble_rows(blocks[:, 48:], 32) | fields(blocks[:, 16:48], 1) << 4
    )


def _q6_k(blocks: Tensor) -> Scaled:
    """210 bytes: 256 numbers of 4 bits, their upper 2 bits, 16 signed scales, scale; around 32."""
    low = _nibble_rows(blocks[:, :128], 64).view(-1, 16, 16)
    high = fields(blocks[:, 128:192].view(-1, 2, 32), 2).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float() * half(blocks, 208)
    return Scaled(_centred(low | high << 4, 32), scales)


def _five_bits(fifth: Tensor, packed: Tensor) -> Tensor:
    """``[num_blocks, 4]`` bits and ``[num_blocks, 16]`` bytes → ``[num_blocks, 32]`` uint8."""
    bits = _SIXTEENS[fifth.int()].view(torch.uint8).flatten(1)
    return bits.bitwise_or_(fields(packed, 4).flatten(1))


def _nibble_rows(packed: Tensor, width: int) -> Tensor:
    """Each ``width`` bytes' low halves, then their high halves, as ``[num_blocks, 8, 32]`` uint8."""
    return fields(packed.view(packed.shape[0], -1, width), 4).reshape(-1, 8, 32)


def _scaled_and_shifted(blocks: Tensor, numbers: Tensor) -> Scaled:
    """``numbers [num_blocks, 8, 32]`` by the 12 bytes in which Q4_K and Q5_K pack what scales them."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 2) & 48], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | (second >> 2) & 48], dim=1)
    offsets = (minima.float() * half(blocks, 2)).neg_()
    return Scaled(numbers.view(torch.int8), scales.float() * half(blocks, 0), offsets)


def _centred(numbers: Tensor, middle: int) -> Tensor:
    """Small unsigned numbers around ``middle`` as int8 around zero."""
    return (numbers - middle).view(torch.int8)


def _iq4_values(places: Tensor) -> Tensor:
    """``[..., 16]`` bytes → ``[..., 2, 16]`` int8: of the low halves, then of the high halves."""
    pairs = _IQ4_PAIRS[places.int()].view(torch.int8).view(*places.shape, 2)
    return pairs.transpose(-1, -2)


SCALED: dict[str, Callable[[Tensor], Scaled]] = {
    "Q5_1": _q5_1,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}

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
