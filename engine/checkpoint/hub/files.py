"""Which files of a repository make a model: chosen by their names alone.

Owns the kinds of files that are ever fetched. What can run code when it is read (``.bin``, ``.pt``, ...)
is none of them. Must not know how files are fetched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ...errors import CheckpointError
from ..safetensors_files import INDEX, PICKLES, SINGLE

SMALL = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""Configuration, tokenizer and templates, at the top of the repository."""

MORE_TEMPLATES = "additional_chat_templates/"

PREFERRED = (
    *("Q4_K_M", "Q8_0", "Q5_K_M", "Q6_K", "Q4_K_S", "Q5_K_S", "Q4_1", "Q4_0", "IQ4_NL"),
    *("Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "F32"),
)
"""Quantisations in the order in which one is taken where none is chosen."""

MAX_LISTED = 12

_PART = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F(?:P)?16|F(?:P)?32))$", re.IGNORECASE
)
_NO_MODELS = re.compile(r"^mmproj|imatrix|^ggml-vocab", re.IGNORECASE)


@dataclass(frozen=True)
class Chosen:
    """A repository's model."""

    weights: tuple[str, ...]  # of a sharded one its index, which names the rest
    gguf: str | None = None  # the file to open; ``None``: the folder is the model
    note: str | None = None  # what was chosen where others might have been


@dataclass
class GGUFModel:
    """One GGUF file, or the parts of one."""

    stem: str
    parts: dict[int, str] = field(default_factory=dict)  # by number, from 1
    count: int = 1

    @property
    def quantization(self) -> str | None:
        found = _QUANT.search(self.stem)
        return found[1].upper().replace("FP", "F", 1) if found else None

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.parts[index] for index in sorted(self.parts))


def choose(names: Collection[str], repo_id: str, choice: str | None = None) -> Chosen:
    """The model in a repository that holds ``names``.

    Safetensors come first; of several GGUF files the one that ``choice`` names, by its name or its
    quantisation, else the most usual quantisation.

    Raises:
        CheckpointError: there is none that octavo reads, or several and nothing says which.
    """
    if choice is None:
        for name in (INDEX, SINGLE):
            if name in names:
                return Chosen((name,))
    models = gguf_models(names)
    if not models:
        raise CheckpointError(_why_none(names, repo_id, choice))
    model, note = _chosen(models, repo_id, choice) if choice else _usual(models, repo_id)
    if sorted(model.parts) != list(range(1, model.count + 1)):
        raise CheckpointError(
            f"{repo_id} has {len(model.parts)} of the {model.count} parts of {model.stem}.gguf."
        )
    return Chosen(model.files, model.files[0], note)


def is_small(name: str) -> bool:
    """Whether ``name`` is one of the files beside the weights."""
    name = name.removeprefix(MORE_TEMPLATES)
    return "/" not in name and any(PurePosixPath(name).match(pattern) for pattern in SMALL)


def gguf_models(names: Iterable[str]) -> list[GGUFModel]:
    """The GGUF files among ``names``, the parts of each together; vision parts and the like are none."""
    models: dict[str, GGUFModel] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or _NO_MODELS.search(path.name):
            continue
        stem = name[: -len(path.suffix)]
        part = _PART.fullmatch(stem)
        stem, index, count = (part[1], int(part[2]), int(part[3])) if part else (stem, 1, 1)
        model = models.setdefault(stem, GGUFModel(stem))
        model.parts[index], model.count = name, count
    return list(models.values())


def _chosen(models: list[GGUFModel], repo_id: str, choice: str) -> tuple[GGUFModel, str | None]:
    wanted = choice.upper()
    found = (
        [m for m in models if choice in m.files or choice == m.stem]
        or [m for m in models if any(PurePosixPath(name).name == choice for name in m.files)]
        or [m for m in models if m.quantization == wanted]
    )
    if len(found) == 1:
        return found[0], None
    if found:
        raise CheckpointError(
            f"{repo_id} has several GGUF files for {choice}: {_listed(found)}; give one's name, as in "
            f"{repo_id}:{found[0].files[0]}."
        )
    raise CheckpointError(f"{repo_id} has no GGUF file for {choice}; it has {_listed(models)}.")


def _usual(models: list[GGUFModel], repo_id: str) -> tuple[GGUFModel, str | None]:
    if len(models) == 1:
        return models[0], None
    for quantization in PREFERRED:
        found = [m for m in models if m.quantization == quantization]
        if len(found) == 1:
            others = len(models) - 1
            note = f"{repo_id}: {found[0].files[0]}, one of {others + 1} GGUF files, since none was chosen"
            return found[0], note
        if found:
            break
    raise CheckpointError(
        f"{repo_id} has several GGUF files: {_listed(models)}; choose one, as in "
        f"{repo_id}:{models[0].quantization or models[0].files[0]}."
    )


def _listed(models: list[GGUFModel]) -> str:
    names = [model.files[0] for model in models]
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _why_none(names: Collection[str], repo_id: str, choice: str | None) -> str:
    if choice is not None:
        return f"{repo_id} has no GGUF files, so there is none to choose by :{choice}."
    for name in sorted(names):
        if PurePosixPath(name).suffix in PICKLES:
            return (
                f"{repo_id} has its weights as {name} only, which can run code when read; octavo reads "
                f"safetensors and GGUF, and fetches nothing else."
            )
    if "adapter_config.json" in names:
        return f"{repo_id} is an adapter for another model, which octavo does not serve."
    return f"{repo_id} has no weights that octavo reads: neither {SINGLE}, {INDEX} nor GGUF files."
