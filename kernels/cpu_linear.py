"""Weights packed once for the native products of ``cpu_linear.cpp``.

Owns which kind of weight a tensor becomes. A packed weight is opaque bytes for this processor, never stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .huge_pages import empty_bytes

_GROUP = 32  # weights that share a scale
Room = Callable[[int], Tensor]
"""Gives ``[size]`` uint8, aligned to 64 bytes: memory for what is packed."""


class RowKind(IntEnum):
    """``octavo::RowKind``: how activations reach a product."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # in groups of 32 with a scale each


class WeightKind(IntEnum):
    """``octavo::WeightKind``."""

    FLOAT32 = 0
    BFLOAT16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4
    Q4_F32 = 5
    Q8_F32 = 6


BLOCK_BYTES = {
    WeightKind.Q4_0: 18,
    WeightKind.Q4_1: 20,
    WeightKind.Q8_0: 34,
    WeightKind.Q4_F32: 24,
    WeightKind.Q8_F32: 44,
}
"""Bytes of a block of 32 weights, by the kinds that come from GGUF (``cpu_linear.h``)."""


def padded_size(size: int) -> int:
    """Numbers that a packed row of ``size`` takes (``octavo::PackedRows``)."""
    return -(-size // _GROUP) * _GROUP


class PackedWeight(NamedTuple):
    """A linear layer ready for this processor."""

    data: Tensor  # uint8, opaque
    kind: WeightKind
    out_features: int
    in_features: int
    row_kind: RowKind
    """What activations are packed as beforehand; FLOAT32: the product reads them as they are."""
    bias: Tensor | None  # [out_features] float32


def pack_weight(
    library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, room: Room = empty_bytes
) -> PackedWeight:
    """Pack ``weight [out_features, in_features]``: bfloat16 as it is, any other type as float32."""
    is_bfloat16 = weight.dtype == torch.bfloat16
    kind = WeightKind.BFLOAT16 if is_bfloat16 else WeightKind.FLOAT32
    source = weight if is_bfloat16 else weight.float()
    if source.stride(1) != 1:
        source = source.contiguous()
    return _pack(library, kind, source, source.shape[1], bias, room)


def pack_gguf_weight(
    library: ctypes.CDLL,
    blocks: Tensor,
    kind: WeightKind,
    bias: Tensor | None = None,
    row_kind: RowKind | None = None,
    room: Room = empty_bytes,
) -> PackedWeight:
    """Pack blocks, losslessly.

    Args:
        blocks: ``[out_features, in_features / 32 * BLOCK_BYTES[kind]]`` uint8.
        kind: one of :data:`BLOCK_BYTES`.
        row_kind: INT8, or the processor's best.
    """
    block_bytes = BLOCK_BYTES[kind]
    if blocks.dtype != torch.uint8 or blocks.shape[1] % block_bytes != 0:
        raise ValueError(f"rows of {kind.name} are whole blocks of {block_bytes} bytes")
    if blocks.stride(1) != 1:
        blocks = blocks.contiguous()
    in_features = blocks.shape[1] // block_bytes * _GROUP
    return _pack(library, kind, blocks, in_features, bias, room, row_kind)


def _pack(
    library: ctypes.CDLL,
    kind: WeightKind,
    source: Tensor,
    in_features: int,
    bias: Tensor | None,
    room: Room,
    row_kind: RowKind | None = None,
) -> PackedWeight:
    if row_kind is None:
        row_kind = RowKind(library.octavo_row_kind(c_int64(kind)))
    out_features = source.shape[0]
    size = library.octavo_packed_size(c_int64(kind), c_int64(out_features), c_int64(in_features))
    data = room(size)
    library.octavo_pack_weight(
        c_int64(kind),
        c_int64(row_kind),
        c_void_p(source.data_ptr()),
        c_int64(source.stride(0) * source.element_size()),
        c_int64(out_features),
        c_int64(in_features),
        c_void_p(data.data_ptr()),
        c_int64(torch.get_num_threads()),
    )
    bias = None if bias is None else bias.float().contiguous()
    return PackedWeight(data, kind, out_features, in_features, row_kind, bias)
