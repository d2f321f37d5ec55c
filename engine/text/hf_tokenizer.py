"""The tokenizer of a Hugging Face folder: ``tokenizer.json`` and what stands beside it.

Owns these files' keys. Must not import transformers, which takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import CheckpointError
from .backend import add_bos, add_nothing, backend_errors


def find_tokenizer_file(path: str | Path) -> Path:
    """``tokenizer.json`` in a folder, or the file itself.

    Raises:
        CheckpointError: there is none; the message says how to make one.
    """
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    raise CheckpointError(
        f"{path} has no tokenizer.json. Write one with transformers, "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), or give --tokenizer a folder "
        "that has one."
    )


def read_hf_tokenizer(file: Path) -> tuple[Tokenizer, str | None, str | None]:
    """The tokenizer with its beginning and end tokens, from ``tokenizer.json`` and its neighbours.

    Whether a text starts with the beginning token is the post-processor's matter; an ``add_bos_token``
    in ``tokenizer_config.json`` overrules it, as in transformers. Truncation and padding that the file
    may ask for are switched off.

    Raises:
        CheckpointError: a file is damaged or inconsistent.
    """
    with backend_errors(str(file)):
        data = _read_json(file)
        backend = _read_backend(file, data)
        backend.no_truncation()
        backend.no_padding()
        config = _read_optional(file.with_name("tokenizer_config.json"))
        special = _read_optional(file.with_name("special_tokens_map.json"))
        bos = _token_text(config, special, "bos_token")
        eos = _token_text(config, special, "eos_token")
        if bos is not None and isinstance(config.get("add_bos_token"), bool):
            _set_adds_bos(backend, bos, config["add_bos_token"])
    return backend, bos, eos


def _read_backend(file: Path, data: Mapping[str, Any]) -> Tokenizer:
    backend = Tokenizer.from_file(str(file))
    added = {token["content"]: token["id"] for token in data.get("added_tokens", ())}
    if all(backend.token_to_id(token) == token_id for token, token_id in added.items()):
        return backend
    return _renumber(file, data, added)


def _renumber(file: Path, data: Mapping[str, Any], added: dict[str, int]) -> Tokenizer:
    """Keep the ids of added tokens, which the library numbers consecutively unless the model has them."""
    vocab = data["model"]["vocab"]
    if not isinstance(vocab, dict):
        raise CheckpointError(
            f"{file} has added tokens whose ids leave holes; octavo cannot keep them."
        )
    model = {**data["model"], "vocab": {**added, **vocab}}
    backend = Tokenizer.from_str(json.dumps({**data, "model": model}))
    for token, token_id in added.items():
        if backend.token_to_id(token) != token_id:
            raise CheckpointError(f"{file} gives the token {token!r} two ids.")
    return backend


def _set_adds_bos(backend: Tokenizer, bos: str, wanted: bool) -> None:
    bos_id = backend.token_to_id(bos)
    has_bos = bos_id in backend.encode("").ids
    if wanted and not has_bos and bos_id is not None:
        add_bos(backend, bos)
    if not wanted and has_bos:
        add_nothing(backend)


def _token_text(config: Mapping[str, Any], special: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name, special.get(name))
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_optional(file: Path) -> dict[str, Any]:
    return _read_json(file) if file.is_file() else {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} must hold a JSON object.")
    return data
