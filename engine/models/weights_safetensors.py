"""Weights of a Hugging Face folder, one or more safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..checkpoint.spec import ModelSpec
from ..errors import CheckpointError
from .family import Family

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsWeights:
    """Implements :class:`~.weights.WeightSource` over mapped files.

    Args:
        path: the folder, for messages.
        family: knows the folder's names and the order of its rows.
        tensor_files: which file holds which tensor; checked by :mod:`...checkpoint`.

    Raises:
        CheckpointError: a file cannot be mapped, or a tensor that is not ignored does not hold
            floating-point numbers.
    """

    def __init__(
        self, path: Path, tensor_files: Mapping[str, Path], spec: ModelSpec, family: Family
    ) -> None:
        self.path = path
        self._spec = spec
        self._family = family
        self._files = tensor_files
        self._open: dict[Path, Any] = {}
        self.shapes = {name: self._shape(name) for name in tensor_files}

    def own_name(self, name: str) -> str:
        return self._family.folder_name(name)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        own_name = self.own_name(name)
        tensor: Tensor = self._handle(own_name).get_tensor(own_name)
        return self._family.arrange(self._spec, name, tensor.to(dtype, copy=True))

    def block_type(self, name: str) -> None:
        """Safetensors hold numbers."""

    def load_blocks(self, name: str) -> None:
        """Safetensors hold numbers."""

    def close(self) -> None:
        self._open.clear()

    def _handle(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged or too short: {error}.") from error
        return self._open[path]

    def _shape(self, name: str) -> tuple[int, ...]:
        part = self._handle(name).get_slice(name)
        is_read = not self._family.is_ignored(self._spec, name)
        if is_read and part.get_dtype() not in FLOAT_TYPES:
            raise CheckpointError(
                f"{self._files[name]}: tensor {name} has type {part.get_dtype()}; octavo reads "
                f"{', '.join(FLOAT_TYPES)}."
            )
        return tuple(part.get_shape())
