"""Weights of a GGUF file: names, order of rows and numbers made transformers'."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from ...kernels.ops import QuantizedRows
from ..checkpoint.gguf_config import ROPE_TENSORS
from ..checkpoint.gguf_file import GGUFFile
from ..checkpoint.spec import ModelSpec
from .dequantize import AS_Q8_0, QUANTIZED_TYPES, dequantize, to_q8_0
from .family import Family


class GGUFWeights:
    """Implements :class:`~.weights.WeightSource` over one GGUF file."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, family: Family) -> None:
        self.path = file.path
        self.shapes = {
            name: tensor.shape for name, tensor in file.tensors.items() if name not in ROPE_TENSORS
        }
        self._file = file
        self._spec = spec
        self._family = family
        self._kept: Counter[str] = Counter()  # quantised matrices, by what became of them
        self._widened: Counter[str] = Counter()

    def own_name(self, name: str) -> str:
        return self._family.gguf_name(self._spec, name)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._file.tensors[self.own_name(name)]
        if tensor.type in QUANTIZED_TYPES:
            self._widened[tensor.type] += 1
        data = torch.from_numpy(self._file.read(tensor.name))
        values = dequantize(data, tensor.type, dtype).view(tensor.shape)
        return self._family.arrange_gguf(self._spec, name, values)

    def block_type(self, name: str) -> str | None:
        type = self._file.tensors[self.own_name(name)].type
        if type not in QUANTIZED_TYPES:
            return None
        return "Q8_0" if type in AS_Q8_0 else type

    def load_blocks(self, name: str) -> QuantizedRows | None:
        type = self.block_type(name)
        if type is None:
            return None
        tensor = self._file.tensors[self.own_name(name)]
        blocks = torch.from_numpy(self._file.read(tensor.name))
        if tensor.type != type:
            blocks = to_q8_0(blocks, tensor.type)
        self._kept[tensor.type if tensor.type == type else f"{tensor.type} as {type}"] += 1
        rows = self._family.arrange_gguf(self._spec, name, blocks.view(tensor.shape[0], -1))
        return QuantizedRows(rows, type)

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
