"""The table of cosines and sines that rotary position embedding looks up.

Frequencies and angles are computed in float32, step by step as transformers does, so that both agree
at every position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """``[rotary_dim / 2]`` float32: angle per position (Su et al., RoFormer, 2021, section 3.2.2).

    Scalings: ``linear`` (Chen et al., 2023, position interpolation) and ``factors`` divide; ``llama3``
    divides what turns slowly, keeps what turns fast and blends between (Llama 3.1).
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    frequencies = torch.pow(rope.theta, exponents).reciprocal()
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / float(scaling["factor"])
    if scaling["rope_type"] == "factors":
        return frequencies / torch.tensor(scaling["factors"])
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    names = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    factor, window, low, high = (float(scaling[name]) for name in names)
    wavelengths = 2 * math.pi / frequencies
    keep = (window / wavelengths - low) / (high - low)  # 0: divide, 1: keep
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / factor + keep * frequencies


def rotary_table(rope: RopeSpec, max_position: int) -> Tensor:
    """``[max_position, rotary_dim]`` float32: cosines, then sines, of every angle."""
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class RotaryTables:
    """One table on the model's device for each way to rotate; layers that rotate alike share it."""

    def __init__(self, max_position: int, device: torch.device) -> None:
        self._max_position = max_position
        self._device = device
        self._tables: list[tuple[RopeSpec, Tensor]] = []

    def table(self, rope: RopeSpec) -> Tensor:  # [max_position, rotary_dim] float32
        for known, table in self._tables:
            if known == rope:
                return table
        table = rotary_table(rope, self._max_position).to(self._device)
        self._tables.append((rope, table))
        return table
