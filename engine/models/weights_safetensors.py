"""Weights of a Hugging Face folder, one or more safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..checkpoint.fused_experts import fused_place
from ..checkpoint.spec import ModelSpec
from ..checkpoint.tensors import Shapes
from ..errors import CheckpointError
from .family import Family
from .finite import is_finite, not_finite


class SafetensorsWeights:
    """Implements :class:`~.weights.WeightSource` over mapped files.

    Args:
        path: the folder, for messages.
        family: knows the folder's names and the order of its rows.
        tensor_files: which file holds which tensor; checked by :mod:`...checkpoint`.
        shapes: of those tensors.
    """

    def __init__(
        self,
        path: Path,
        tensor_files: Mapping[str, Path],
        shapes: Shapes,
        spec: ModelSpec,
        family: Family,
    ) -> None:
        self.path = path
        self._spec = spec
        self._family = family
        self._files = tensor_files
        self._open: dict[Path, Any] = {}
        self.shapes = shapes

    def own_name(self, name: str) -> str:
        return self._family.folder_name(name)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        stored, tensor = self._read(name)
        if not is_finite(tensor):
            raise not_finite(self._files[stored], stored)
        return self._family.arrange(self._spec, name, tensor.to(dtype, copy=True))

    def _read(self, name: str) -> tuple[str, Tensor]:
        """The tensor of the files that holds ``name``, and what it holds of it, mapped."""
        stored = self.own_name(name)
        if stored not in self._files:  # the folder has fused experts
            place = fused_place(name)
            if place is not None:
                matrices = self._handle(place.tensor).get_slice(place.tensor)
                num_rows = matrices.get_shape()[1] // place.num_parts
                rows = slice(place.part * num_rows, (place.part + 1) * num_rows)
                return place.tensor, matrices[place.expert : place.expert + 1, rows][0]
            stored = name
        return stored, self._handle(stored).get_tensor(stored)

    def block_types(self, name: str) -> tuple[str, ...]:
        return ()

    def load_blocks(self, name: str, type: str) -> NoReturn:
        raise TypeError(f"safetensors hold numbers; {name} is not in blocks of {type}")

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
