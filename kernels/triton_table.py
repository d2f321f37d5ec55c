"""Tile shapes of the attention kernel by architecture, head dimension and precision.

Chosen ahead of time: nothing is tuned at run time. ``benchmarks/triton_tiles.py`` writes ``triton_tiles.py``
and says by what reasoning.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_gpu import Architecture
from .triton_tiles import TILES

PREFILL, DECODE = "prefill", "decode"
HEAD_PADS = (64, 128, 256)
"""Head dimensions are padded to the next of these; the smallest also holds those below."""
PRECISIONS = ("half", "fp8", "single")

MIN_SPLIT_KEYS = 512
"""A decode row's keys are not split into shorter parts than this.

Chosen by reasoning: a part's partial result is written and read back, 8 bytes an output number and query head.
With 16-bit KV and 4 query heads a KV head, that is 1.6% of the bytes that 512 keys and values take.
"""
PROGRAMS_PER_SM = 2
"""A lone long row is split into as many parts as give each SM this many programs."""
MERGE_PARTS = 16
"""Parts that the merging kernel takes at a time."""
MERGE_WARPS = 2


class Tile(NamedTuple):
    """One kernel configuration."""

    block_m: int  # rows: query tokens times query heads of a KV head
    block_n: int  # keys in a step
    num_warps: int
    num_stages: int  # steps whose loads are in flight


def head_pad_for(head_dim: int) -> int:
    """What heads are padded to inside the kernel.

    Raises:
        ValueError: a head is wider than the kernels are made for.
    """
    if head_dim > HEAD_PADS[-1]:
        raise ValueError(f"The Triton kernels take heads of up to {HEAD_PADS[-1]}, not {head_dim}.")
    return max(16, 1 << (head_dim - 1).bit_length())


def precision_of(query: torch.dtype, cache: torch.dtype) -> str:
    """Which of :data:`PRECISIONS` the products of these types count as."""
    if torch.float32 in (query, cache):
        return "single"
    return "fp8" if cache == torch.float8_e4m3fn else "half"


def tile_for(arch: Architecture, phase: str, head_dim: int, precision: str) -> Tile:
    """The configuration of one launch; ``phase`` is :data:`PREFILL` or :data:`DECODE`."""
    column = max(head_pad_for(head_dim), HEAD_PADS[0])
    return Tile(*TILES[arch.name, phase, precision, column])
