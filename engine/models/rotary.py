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


def inverse_frequencies(rope: RopeSpec, max_position: int) -> Tensor:
    """``[rotary_dim / 2]`` float32: angle per position (Su et al., RoFormer, 2021, section 3.2.2).

    Scalings: ``linear`` (Chen et al., 2023, position interpolation) and ``factors`` divide; ``llama3``
    divides what turns slowly, keeps what turns fast and blends between (Llama 3.1), and so does ``yarn``
    by other bounds (Peng et al., 2023, arXiv 2309.00071, section 3.2). ``longrope`` (Ding et al., 2024,
    arXiv 2402.13753) divides each frequency by its own factor, of the short ones if no position passes
    the original window and of the long ones otherwise.

    Args:
        max_position: number of positions that may come. The choice of ``longrope`` is made once for all of
            them: cached keys are shared by sequences of any length.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    periods = torch.pow(rope.theta, exponents)  # positions for one radian
    scaling = rope.scaling
    if scaling is None:
        return periods.reciprocal()
    if scaling["rope_type"] == "linear":
        return periods.reciprocal() / float(scaling["factor"])
    if scaling["rope_type"] == "factors":
        return periods.reciprocal() / torch.tensor(scaling["factors"])
    if scaling["rope_type"] == "longrope":
        is_long = max_position > scaling["original_max_position_embeddings"]
        factors = torch.tensor(scaling["long_factor" if is_long else "short_factor"])
        return (factors * periods).reciprocal()
    if scaling["rope_type"] == "yarn":
        return _yarn(periods, rope, scaling)
    return _llama3(periods.reciprocal(), scaling)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    names = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    factor, window, low, high = (float(scaling[name]) for name in names)
    wavelengths = 2 * math.pi / frequencies
    keep = (window / wavelengths - low) / (high - low)  # 0: divide, 1: keep
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / factor + keep * frequencies


def _yarn(periods: Tensor, rope: RopeSpec, scaling: Mapping[str, Any]) -> Tensor:
    original, dim = float(scaling["original_max_position_embeddings"]), rope.rotary_dim
    factor = float(scaling["factor"])

    def index_that_turns(times: float) -> float:
        """Of the frequency that turns so often within the original window."""
        return (dim * math.log(original / (times * 2 * math.pi))) / (2 * math.log(rope.theta))

    first, last = index_that_turns(scaling["beta_fast"]), index_that_turns(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, dim - 1.0)
    if first == last:
        last += 0.001
    indices = torch.arange(dim // 2, dtype=torch.float32)
    keep = 1 - ((indices - first) / (last - first)).clamp(0, 1)
    slow, fast = (factor * periods).reciprocal(), periods.reciprocal()
    return slow * (1 - keep) + fast * keep


def rotary_table(rope: RopeSpec, max_position: int) -> Tensor:
    """``[max_position, rotary_dim]`` float32: cosines, then sines, of every angle."""
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, max_position))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor)


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
