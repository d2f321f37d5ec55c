"""Tile shapes of the experts' kernel by architecture, crowd and precision.

Chosen ahead of time: nothing is tuned at run time. ``benchmarks/triton_experts_tiles.py`` writes
``triton_experts_tiles.py`` and says by what reasoning.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_experts_tiles import TILES
from .triton_gpu import Architecture

FEW, MANY = "few", "many"
"""How many rows an expert has on average: up to the 16 that the matrix units take at least, or more."""
FEW_ROWS = 16
PRECISIONS = ("half", "single")


class Tile(NamedTuple):
    """One kernel configuration."""

    block_m: int  # rows of one expert
    block_n: int  # columns; where gate and up are computed, of each of them
    block_k: int  # numbers of a row in a step
    num_warps: int
    num_stages: int  # steps whose loads are in flight


def crowd_of(num_rows: int, num_experts: int) -> str:
    """:data:`FEW` or :data:`MANY`; known on the host, so by the average."""
    return FEW if num_rows <= FEW_ROWS * num_experts else MANY


def tile_for(arch: Architecture, crowd: str, dtype: torch.dtype) -> Tile:
    """The configuration of one launch."""
    precision = "single" if dtype == torch.float32 else "half"
    return Tile(*TILES[arch.name, crowd, precision])
