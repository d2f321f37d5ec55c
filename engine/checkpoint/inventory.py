"""The models of this machine: what the Hub's cache and local folders hold, and what would fit the memory.

Reads headers alone, never weights. Must not import torch; the Hub's library only when its cache is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api import LocalModel
from ..errors import CheckpointError
from .checkpoint import Checkpoint, open_checkpoint
from .hub.files import gguf_models
from .memory_blocks import kept_bytes
from .spec import ModelSpec, auto_dtype
from .tensors import check_tensors, tensor_shapes

KV_TOKENS = 1000
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EMBEDDINGS, _HEADS = (
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("lm_head.weight", "output.weight"),
)


@dataclass(frozen=True)
class Machine:
    """What decides in which form weights are kept, and the memory for them."""

    device: str  # "cpu" or "cuda"
    free_bytes: int
    has_bfloat16: bool = True  # its processor computes in it
    keeps_blocks: bool = False  # its kernels compute with quantised GGUF matrices as they are


@dataclass(frozen=True)
class _Found:
    """A model's name and place, still unopened."""

    name: str
    path: Path
    files: tuple[Path, ...]
    revision: str | None = None


def list_models(
    machine: Machine,
    paths: Iterable[str | Path] = (),
    *,
    embedded: tuple[str, Path] | None = None,
    cache_dir: str | None = None,
) -> list[LocalModel]:
    """Every model of ``paths``, the embedded one, and those of the Hub's cache.

    Args:
        paths: models, or folders of models; one that holds none is listed with the reason.
        embedded: name and file.
        cache_dir: the Hub's cache; ``None``: where HF_HOME and HF_HUB_CACHE say.
    """
    found = [one for path in paths for one in _local(Path(path).expanduser())]
    if embedded is not None:
        found.append(_Found(embedded[0], embedded[1], (embedded[1],)))
    return [_described(one, machine) for one in (*found, *_cached(cache_dir))]


def _local(path: Path) -> list[_Found]:
    if not os.path.isdir(path):  # unlike Path's, false of what is too long for a name
        return [_Found(str(path), path, (path,) if os.path.isfile(path) else ())]
    inside = [
        model
        for folder in (path, *sorted(p for p in path.glob("*") if p.is_dir()))
        for model in _in_folder(folder, str(folder))
    ]
    return inside or [_Found(str(path), path, ())]


def _in_folder(folder: Path, name: str, revision: str | None = None) -> Iterator[_Found]:
    """The models in a folder: itself, and each of its GGUF files; a repository's lie deeper, too."""
    inside = folder.glob("*" if revision is None else "**/*")
    files = sorted(path for path in inside if path.is_file())
    whole = [p for p in files if p.suffix == ".safetensors" and p.parent == folder]
    ggufs = gguf_models(p.relative_to(folder).as_posix() for p in files)
    if whole or ((folder / "config.json").is_file() and not ggufs):
        yield _Found(name, folder, tuple(p for p in files if p.suffix != ".gguf"), revision)
    for model in ggufs:
        parts = tuple(folder / part for part in model.files)
        label = f"{name}:{model.files[0]}" if revision else str(parts[0])
        yield _Found(label, parts[0], parts, revision)


def _cached(cache_dir: str | None) -> list[_Found]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache_dir).repos
    except (CacheNotFound, ValueError):  # ValueError: a file in its place
        return []
    found = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        for revision in sorted(repo.revisions, key=lambda one: one.commit_hash):
            if repo.repo_type != "model":
                continue
            refs = ", ".join(sorted(revision.refs)) or revision.commit_hash
            found += list(_in_folder(revision.snapshot_path, repo.repo_id, refs))
    return found


def _described(found: _Found, machine: Machine) -> LocalModel:
    size = sum(path.stat().st_size for path in found.files)
    try:
        checkpoint = open_checkpoint(found.path)
        if checkpoint.spec.implementation == "octavo":
            check_tensors(checkpoint, tensor_shapes(checkpoint))
        facts = _facts(checkpoint, machine)
    except CheckpointError as error:
        facts = {"problem": str(error)}
    return LocalModel(
        name=found.name,
        path=str(found.path),
        revision=found.revision,
        size_bytes=size,
        free_bytes=machine.free_bytes,
        **facts,
    )


def _facts(checkpoint: Checkpoint, machine: Machine) -> dict[str, Any]:
    spec = checkpoint.spec
    dtype = auto_dtype(spec, on_cpu=machine.device == "cpu", has_bfloat16=machine.has_bfloat16)
    weight_bytes = _weight_bytes(checkpoint, machine, _ITEM_BYTES[dtype])
    kv_bytes = KV_TOKENS * kv_token_bytes(spec, _ITEM_BYTES[dtype])
    room = max(0, machine.free_bytes - weight_bytes) * KV_TOKENS // kv_bytes
    return {
        "architecture": spec.architecture,
        "dtype": dtype,
        "quantization": spec.quantization,
        "window": checkpoint.window,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_1k_tokens": kv_bytes,
        "max_tokens": min(checkpoint.window, room),
        "fits": room >= min(checkpoint.window, KV_TOKENS),
    }


def kv_token_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * item_bytes


def _weight_bytes(checkpoint: Checkpoint, machine: Machine, item_bytes: int) -> int:
    """What the weights take in memory. A tied head counts once more where it is packed for the processor."""
    total = 0
    for name, shape, blocks in _tensors(checkpoint):
        widened = math.prod(shape) * item_bytes
        kept = blocks if blocks and machine.keeps_blocks else widened
        is_embedding = name in _EMBEDDINGS
        total += widened if is_embedding else kept
        if is_embedding and checkpoint.spec.tie_word_embeddings and machine.device == "cpu":
            total += kept
    return total


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Name, shape, and of matrices that may stay in blocks their bytes in memory, of every tensor that is kept."""
    is_tied = checkpoint.spec.tie_word_embeddings
    if checkpoint.gguf is not None:
        for tensor in checkpoint.gguf.tensors.values():
            is_matrix = len(tensor.shape) > 1
            blocks = kept_bytes(tensor.type, math.prod(tensor.shape)) if is_matrix else None
            yield tensor.name, tensor.shape, blocks
        return
    for name, shape in tensor_shapes(checkpoint).items():
        if not (is_tied and name in _HEADS):
            yield name, shape, None
