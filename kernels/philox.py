"""Philox4x32-10: random numbers as a pure function of a key and a counter (Salmon et al., SC 2011).

Every op set draws its samples from this rule, so that a sample depends on its seed and position and on
nothing else.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds over 32-bit words held in int64.

    Args:
        counter: ``[4, n]`` int64, words in ``0 .. 2**32 - 1``.
        key: ``[2, n]`` int64, words in ``0 .. 2**32 - 1``.

    Returns:
        ``[4, n]`` int64, words in ``0 .. 2**32 - 1``.
    """
    device = counter.device
    multipliers, steps = _constants(device)
    rounds = torch.arange(_NUM_ROUNDS, device=device).view(-1, 1, 1)
    keys = (key + rounds * steps) & _MASK  # [rounds, 2, n]
    multiplied, mixed = counter[0::2], counter[1::2]
    for round_key in keys:
        # The int64 product wraps, which leaves its 64 bits intact; the shift's sign bits are masked.
        product = multiplied * multipliers
        high = ((product >> 32) & _MASK).flip(0)
        multiplied, mixed = high ^ mixed ^ round_key, (product & _MASK).flip(0)
    return torch.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers and key steps, ``[2, 1]`` int64 each; copied to a device once, as a copy waits for it."""
    with torch.inference_mode(False):  # usable in and out of it
        multipliers = torch.tensor(_MULTIPLIERS, device=device).unsqueeze(1)
        return multipliers, torch.tensor(_KEY_STEPS, device=device).unsqueeze(1)


def philox_uniform(seed: Tensor, position: Tensor) -> Tensor:
    """One uniform per (seed, position): the key is the seed, the counter is the position.

    Args:
        seed: ``[n]`` int64, any value.
        position: ``[n]`` int64, any value.

    Returns:
        ``[n]`` float64 in [0, 1), made of 53 random bits.
    """
    key = torch.stack((seed & _MASK, (seed >> 32) & _MASK))
    zero = torch.zeros_like(position)
    counter = torch.stack((position & _MASK, (position >> 32) & _MASK, zero, zero))
    words = philox4x32(counter, key)
    bits = ((words[0] >> 5) << 26) | (words[1] >> 6)
    return bits.to(torch.float64) * 2.0**-53
