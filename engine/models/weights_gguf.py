"""Weights of a GGUF file: names, order of rows and numbers made transformers'."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import Tensor

from ...kernels.ops import QuantizedRows
from ..checkpoint.gguf_file import GGUFFile, GGUFTensor
from ..checkpoint.memory_blocks import KEPT_AS
from ..checkpoint.spec import ModelSpec
from ..checkpoint.tensors import Shapes
from .dequantize import QUANTIZED_TYPES, as_numbers, dequantize
from .family import Family
from .finite import are_scales_finite, is_finite, not_finite
from .reblock import reblock

_MATRIX = re.compile(r"(?P<module>.*)\[(?P<index>\d+)\](?P<kind>[^\[\]]*)")


class GGUFWeights:
    """Implements :class:`~.weights.WeightSource` over one GGUF file."""

    def __init__(self, file: GGUFFile, shapes: Shapes, spec: ModelSpec, family: Family) -> None:
        self.path = file.path
        self.shapes = shapes
        self._file = file
        self._spec = spec
        self._family = family
        self._kept: Counter[str] = Counter()  # quantised matrices, by what became of them
        self._widened: Counter[str] = Counter()
        self._checked: set[str] = set()  # own names of what holds numbers, all of them finite

    def own_name(self, name: str) -> str:
        return self._family.gguf_name(self._spec, name)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        own_name = self.own_name(name)
        data, type = self._read(own_name)
        if type in QUANTIZED_TYPES:
            self._widened[type] += 1
        values = dequantize(data, type, dtype).view(self.shapes[own_name])
        return self._family.arrange_gguf(self._spec, name, values)

    def block_types(self, name: str) -> tuple[str, ...]:
        return KEPT_AS.get(self._file.tensors[_tensor_of(self.own_name(name))].type, ())

    def load_blocks(self, name: str, type: str) -> QuantizedRows:
        own_name = self.own_name(name)
        data, own_type = self._read(own_name)
        blocks = reblock(data, own_type, type)
        self._kept[own_type if own_type == type else f"{own_type} as {type}"] += 1
        rows = blocks.view(self.shapes[own_name][0], -1)
        return QuantizedRows(self._family.arrange_gguf(self._spec, name, rows), type)

    def _read(self, own_name: str) -> tuple[Tensor, str]:
        """Bytes of one tensor or matrix, ``[num_bytes]`` uint8, and their type."""
        name = _tensor_of(own_name)
        tensor = self._file.tensors[name]
        data = torch.from_numpy(self._file.read(name))
        if matrix := _MATRIX.fullmatch(own_name):
            data = data.view(tensor.shape[0], -1)[int(matrix["index"])]
        if own_name not in self._checked:  # a tied embedding comes twice
            self._check_finite(tensor, data)
            self._checked.add(own_name)
        return data, tensor.type

    def _check_finite(self, tensor: GGUFTensor, data: Tensor) -> None:
        """Look at one tensor or matrix, ``[num_bytes]`` uint8."""
        if tensor.type in QUANTIZED_TYPES:
            is_sound = are_scales_finite(data, tensor.type)
        else:
            is_sound = is_finite(as_numbers(data, tensor.type))
        if not is_sound:
            raise not_finite(tensor.path, tensor.name)

    def storage(self) -> str:
        """What became of the quantised matrices that were read, for the log."""
        counts = {"kept in blocks": self._kept, "widened": self._widened}
        parts = [
            f"{what} {', '.join(f'{count} {type}' for type, count in sorted(types.items()))}"
            for what, types in counts.items()
            if types
        ]
        return "; ".join(parts) or "none is quantised"

    def close(self) -> None:
        """Tensors are mapped one by one, so nothing is held."""


def _tensor_of(own_name: str) -> str:
    """The tensor that holds a matrix, or itself."""
    matrix = _MATRIX.fullmatch(own_name)
    return own_name if matrix is None else matrix["module"] + matrix["kind"]
