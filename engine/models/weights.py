"""Where a model gets its tensors from.

Tensors go by transformers' names ("model.layers.0.self_attn.q_proj.weight"); a source translates to
its file's own. One tensor is in memory at a time beyond what the model keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import QuantizedRows


class WeightSource(Protocol):
    """The tensors of one opened checkpoint."""

    path: Path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor, by the file's own names."""

    def own_name(self, name: str) -> str:
        """The file's name of the tensor that transformers calls ``name``."""

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one tensor into memory of its own, in transformers' layout, on the CPU."""

    def block_types(self, name: str) -> tuple[str, ...]:
        """Types of the blocks that :meth:`load_blocks` can give, the smallest first."""

    def load_blocks(self, name: str, type: str) -> QuantizedRows:
        """One matrix in blocks that hold what the file holds, rows in transformers' order."""

    def close(self) -> None:
        """Let go of the files."""


class Weights:
    """Hands a model its tensors in the wanted type and place.

    Args:
        quantized_types: of blocks that :meth:`read_linear` may give.
        on_read: called after each tensor with the number of tensors read so far.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        on_read: Callable[[int], None] | None = None,
        quantized_types: frozenset[str] = frozenset(),
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.path = source.path
        self._source = source
        self._on_read = on_read
        self._quantized_types = quantized_types
        self._num_read = 0

    def __contains__(self, name: str) -> bool:
        return self._source.own_name(name) in self._source.shapes

    def keeps_blocks(self, name: str) -> bool:
        """Whether :meth:`read_linear` gives this matrix in blocks."""
        return self._common_type([name]) is not None

    def _common_type(self, names: Sequence[str]) -> str | None:
        """The smallest blocks that hold all of these matrices, if there are any and they may be given."""
        first, *others = (self._source.block_types(name) for name in names)
        wanted = (type for type in first if type in self._quantized_types)
        return next((type for type in wanted if all(type in types for types in others)), None)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor = self._source.load(name, self.dtype).to(self.device)
        self._note_read(1)
        return tensor

    def _note_read(self, num_tensors: int) -> None:
        self._num_read += num_tensors
        if self._on_read is not None:
            self._on_read(self._num_read)

    def read_rows(self, names: Iterable[str]) -> Tensor:
        """Several tensors, one below the other: several linear layers as one."""
        parts = [self.read(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_linear(self, names: Iterable[str]) -> Tensor | QuantizedRows:
        """As :meth:`read_rows`; in blocks if there are some that hold all of them."""
        names = list(names)
        type = self._common_type(names)
        if type is None:
            return self.read_rows(names)
        parts = [self._source.load_blocks(name, type) for name in names]
        self._note_read(len(parts))
        if len(parts) == 1:
            return parts[0]
        return QuantizedRows(torch.cat([part.blocks for part in parts]), type)
