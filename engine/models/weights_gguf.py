"""Weights of a GGUF file: names, order of rows and numbers made transformers'."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.ops import QuantizedRows
from ..checkpoint.gguf_config import ROPE_FACTORS
from ..checkpoint.gguf_file import GGUFFile
from ..checkpoint.spec import ModelSpec
from .dequantize import QUANTIZED_TYPES, dequantize
from .family import Family


class GGUFWeights:
    """Implements :class:`~.weights.WeightSource` over one GGUF file."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, family: Family) -> None:
        self.path = file.path
        self.shapes = {
            name: tensor.shape for name, tensor in file.tensors.items() if name != ROPE_FACTORS
        }
        self._file = file
        self._spec = spec
        self._family = family

    def own_name(self, name: str) -> str:
        return self._family.gguf_name(self._spec, name)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._file.tensors[self.own_name(name)]
        data = torch.from_numpy(self._file.read(tensor.name))
        values = dequantize(data, tensor.type, dtype).view(tensor.shape)
        return self._family.arrange_gguf(self._spec, name, values)

    def load_blocks(self, name: str) -> QuantizedRows | None:
        tensor = self._file.tensors[self.own_name(name)]
        if tensor.type not in QUANTIZED_TYPES:
            return None
        blocks = torch.from_numpy(self._file.read(tensor.name)).view(tensor.shape[0], -1)
        return QuantizedRows(self._family.arrange_gguf(self._spec, name, blocks), tensor.type)

    def close(self) -> None:
        """Tensors are mapped one by one, so nothing is held."""
