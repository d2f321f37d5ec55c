"""Linear layers over ``cpu_linear.cpp``: packing their weights, and products with them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .cpu_calls import NativeCalls, address_of, require
from .cpu_linear import (
    BLOCK_BYTES,
    PackedWeight,
    Room,
    RowKind,
    WeightKind,
    pack_gguf_weight,
    pack_weight,
    padded_size,
)
from .cpu_structs import Args, LikeliestArgs, LinearArgs, PackRowsArgs, program
from .huge_pages import empty_bytes
from .ops import QuantizedRows


class ProductOps(NativeCalls):
    """The ops of linear layers; contracts in :class:`~.ops.Ops`.

    Args:
        library: from :func:`~.cpu_build.load_library`.
        rounds_activations: products with GGUF's blocks always take activations of 8 bits, in groups of 32.
    """

    quantized_types = frozenset(kind.name for kind in BLOCK_BYTES)

    def __init__(self, library: ctypes.CDLL, *, rounds_activations: bool = False) -> None:
        super().__init__(library)
        self._row_kind = RowKind.INT8 if rounds_activations else None

    def pack_linear(
        self, weight: Tensor | QuantizedRows, bias: Tensor | None = None
    ) -> PackedWeight:
        return self._packed(weight, bias, empty_bytes)

    def _packed(
        self, weight: Tensor | QuantizedRows, bias: Tensor | None, room: Room
    ) -> PackedWeight:
        if isinstance(weight, QuantizedRows):
            kind = WeightKind[weight.type]
            return pack_gguf_weight(self._library, weight.blocks, kind, bias, self._row_kind, room)
        return pack_weight(self._library, weight, bias, room)

    def pack_head(self, weight: Tensor | QuantizedRows) -> PackedWeight:
        return self.pack_linear(weight)

    def linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        size = packed.in_features
        require(x.shape[1] == size, f"rows of {x.shape[1]} times a weight of {size} in_features")
        return self._multiply(x, packed, self._tokens(x))

    def _multiply(
        self,
        x: Tensor,
        packed: PackedWeight,
        num_rows: int,
        *,
        sources: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """A product of as many rows as the number at the address ``num_rows`` says.

        Args:
            sources: ``[max_num_rows]`` int32, which of x's rows each row is; ``None``: the same one.
            starts: ``[num_groups + 1]`` int32, the first row of each of ``packed``'s weights; ``None``: it is one.
        """
        capacity = x.shape[0] if sources is None else sources.shape[0]
        out = self._empty((capacity, packed.out_features))
        product = LinearArgs(
            out=out.data_ptr(),
            out_stride=out.stride(0),
            group_starts=None if starts is None else starts.data_ptr(),
            num_groups=0 if starts is None else len(starts) - 1,
            weight_stride=0 if starts is None else packed.data.stride(0),
        )
        steps, _rows = self._product(product, x, packed, num_rows, capacity, sources)
        for step in steps:
            self._do(step)
        return out

    def _product(
        self,
        product: LinearArgs,
        x: Tensor,
        packed: PackedWeight,
        num_rows: int,
        capacity: int,
        sources: Tensor | None = None,
    ) -> tuple[list[Args], Tensor | None]:
        """Say in ``product`` what is multiplied.

        Returns:
            The ops in order, ``product`` last, and packed rows to be kept until they have run.
        """
        address, stride, rows = address_of(x), x.stride(0), None
        steps: list[Args] = [product]
        if packed.row_kind != RowKind.FLOAT32 or sources is not None:
            rows = self._empty((self._packed_rows_size(packed, capacity),), torch.uint8)
            pack = PackRowsArgs(
                num_tokens=num_rows,
                x=address,
                x_stride=stride,
                sources=None if sources is None else sources.data_ptr(),
                num_sources=x.shape[0],
                size=packed.in_features,
                kind=packed.row_kind,
                capacity=capacity,
                out=rows.data_ptr(),
            )
            steps.insert(0, pack)
            address, stride = rows.data_ptr(), padded_size(packed.in_features)
        product.num_tokens, product.capacity = num_rows, capacity
        product.x, product.x_stride, product.row_kind = address, stride, packed.row_kind
        product.weight, product.kind = packed.data.data_ptr(), packed.kind
        product.in_features, product.out_features = packed.in_features, packed.out_features
        product.bias = None if packed.bias is None else packed.bias.data_ptr()
        return steps, rows

    def _packed_rows_size(self, packed: PackedWeight, capacity: int) -> int:
        size: int = self._library.octavo_packed_rows_size(
            packed.row_kind, capacity, packed.in_features
        )
        return size

    def logits(self, x: Tensor, packed: PackedWeight) -> Tensor:
        return self.linear(x, packed)

    def likeliest(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """The most likely token of each row, without its logits in memory. No part of a recorded step."""
        size, num_rows = packed.in_features, x.shape[0]
        require(x.shape[1] == size, f"rows of {x.shape[1]} times a weight of {size} in_features")
        num_bytes = self._library.octavo_likeliest_size(torch.get_num_threads(), num_rows)
        seen = torch.empty(num_bytes, dtype=torch.uint8)
        out = torch.empty(num_rows, dtype=torch.int64)
        cell = self._tokens(x)
        product = LinearArgs(likeliest=seen.data_ptr())
        steps, _rows = self._product(product, x, packed, cell, num_rows)
        last = LikeliestArgs(
            num_rows=cell, likeliest=seen.data_ptr(), capacity=num_rows, out=out.data_ptr()
        )
        self.run(program([*steps, last]))
        return out
