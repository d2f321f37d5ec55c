"""The safetensors files of a Hugging Face folder: which file holds which tensor.

Every file's header is checked against its length. Files that run code when read (``.bin``, ``.pt``)
are never opened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def find_tensors(folder: Path) -> dict[str, Path]:
    """Map every tensor name to its file.

    Raises:
        CheckpointError: there are no safetensors, a shard is missing, damaged or short, or the index
            and the shards disagree.
    """
    if (folder / INDEX).is_file():
        return _find_in_shards(folder)
    path = folder / SINGLE
    if not path.is_file():
        raise CheckpointError(_why_none(folder))
    return dict.fromkeys(tensor_names(path), path)


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in one file.

    Raises:
        CheckpointError: the file is missing, damaged or short.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged or too short: {error}.") from error


def tensor_headers(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of the tensors in one file, by name.

    Raises:
        CheckpointError: the file is missing, damaged or short.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (tuple(part.get_shape()), part.get_dtype()) for n, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged or too short: {error}.") from error


def commonest_dtype(tensor_files: Mapping[str, Path]) -> str | None:
    """The type of most numbers in the files, where it is one to compute in; for a config that names none.

    Raises:
        CheckpointError: a file is damaged or short.
    """
    counts: Counter[str] = Counter()
    for path in set(tensor_files.values()):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    counts[part.get_dtype()] += math.prod(part.get_shape())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged or too short: {error}.") from error
    return _DTYPES.get(counts.most_common(1)[0][0]) if counts else None


def shard_names(folder: Path) -> list[str]:
    """Names of the files that the index in ``folder`` names.

    Raises:
        CheckpointError: it cannot be read.
    """
    return sorted(set(map(str, _weight_map(folder / INDEX).values())))


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    return weight_map


def _find_in_shards(folder: Path) -> dict[str, Path]:
    index, weight_map = folder / INDEX, _weight_map(folder / INDEX)
    shards = {name: _shard(folder, name) for name in shard_names(folder)}
    found = {tensor: path for path in shards.values() for tensor in tensor_names(path)}
    for tensor, name in weight_map.items():
        if found.get(tensor) != shards[str(name)]:
            raise CheckpointError(
                f"{shards[str(name)]} lacks tensor {tensor}, which {index} names."
            )
    return found


def _shard(folder: Path, name: str) -> Path:
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise CheckpointError(f"{folder / INDEX} names the file {name}, which is not beside it.")
    return path


def _why_none(folder: Path) -> str:
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES:
            return (
                f"{folder} holds its weights as {path.name}, which can run code when read; "
                f"octavo reads safetensors and GGUF only."
            )
    return f"{folder} has no weights: neither {SINGLE} nor {INDEX}."
