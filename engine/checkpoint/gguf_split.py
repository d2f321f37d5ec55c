"""GGUF files that were split into parts, opened as one file.

Owns the parts' names (``NAME-00001-of-00003.gguf``) and their ``split.*`` keys: the first part has the
metadata of the whole, every part its own tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import CheckpointError
from .fields import Fields
from .gguf_file import GGUFFile, GGUFTensor

_PART_NAME = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file; of a split one all parts, which lie beside the first.

    Raises:
        CheckpointError: as :meth:`GGUFFile.open`; or a part is missing, is not the part that its name
            says, or holds what another part holds; or ``path`` is not the first part.
    """
    first = GGUFFile.open(path)
    count = _size(first, "split.count") or 1
    if count == 1:
        return first
    paths = _part_paths(first.path, count)
    if first.path != paths[0]:
        raise CheckpointError(
            f"{first.path} is one part of a split GGUF file; give the first, {paths[0]}."
        )
    tensors: dict[str, GGUFTensor] = {}
    for index, part_path in enumerate(paths):
        part = first if index == 0 else _open_part(part_path, index, count)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{part_path} is damaged: tensor {name} is in {tensors[name].path} too."
                )
            tensors[name] = tensor
    expected = _size(first, "split.tensors.count")
    if expected is not None and expected != len(tensors):
        raise CheckpointError(
            f"{first.path} speaks of {expected} tensors; its {count} parts hold {len(tensors)}."
        )
    return GGUFFile(first.path, first.metadata, tensors)


def find_gguf(folder: Path) -> Path | None:
    """The one GGUF model in a folder, by its first part if it is split; ``None``: there is none.

    Raises:
        CheckpointError: there are several.
    """
    models = [path for path in sorted(folder.glob("*.gguf")) if _is_model(path)]
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise CheckpointError(f"{folder} holds several models: {names}; give the path of one.")
    return models[0] if models else None


def _is_model(path: Path) -> bool:
    """Later parts and the image encoders that lie beside some models are none."""
    match = _PART_NAME.fullmatch(path.name)
    if match is not None and int(match["part"]) > 1:
        return not path.with_name(_part_name(match["name"], 0, int(match["count"]))).exists()
    return not path.name.startswith("mmproj")


def _part_name(name: str, index: int, count: int) -> str:
    return f"{name}-{index + 1:05d}-of-{count:05d}.gguf"


def _part_paths(path: Path, count: int) -> list[Path]:
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a split GGUF file, and its name must end in "
            f"-00001-of-{count:05d}.gguf for the others to be found."
        )
    return [path.with_name(_part_name(match["name"], index, count)) for index in range(count)]


def _open_part(path: Path, index: int, count: int) -> GGUFFile:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the model is split into {count} files.")
    part = GGUFFile.open(path)
    if (_size(part, "split.no"), _size(part, "split.count")) != (index, count):
        raise CheckpointError(f"{path} is not part {index + 1} of {count}: its split.no differs.")
    return part


def _size(file: GGUFFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        Fields(file.metadata, str(file.path)).refuse(key, value, "a count")
    return value
