"""End ids and sampling defaults of a GGUF file: what ``generation_config.json`` is to a folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..api import SamplingParams
from ..errors import CheckpointError, InvalidRequestError
from .fields import id_list
from .gguf_file import GGUFFile

_KEY = "tokenizer.ggml."
_CONTROL = 3  # a value of tokenizer.ggml.token_type
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Of ``general.sampling.*``, to fields of :class:`SamplingParams`."""


def gguf_ids(file: GGUFFile, vocab_size: int, *names: str) -> tuple[int, ...]:
    """The ids under ``tokenizer.ggml.NAME_token_id``, as far as there are any.

    Raises:
        CheckpointError: one is no token id of the model.
    """
    ids: tuple[int, ...] = ()
    for key in (f"{_KEY}{name}_token_id" for name in names):
        ids += id_list(file.metadata.get(key), f"{file.path}: {key}", vocab_size)
    return ids


def find_gguf_eos_ids(file: GGUFFile, vocab_size: int) -> tuple[int, ...]:
    """The ends of text, of turn and of message that the file names, and control tokens that are one.

    Many files name the end of text only, though their chats end with another token: as llama.cpp does,
    that one is known by how it is written.

    Raises:
        CheckpointError: an id is no token of the model.
    """
    ids = gguf_ids(file, vocab_size, "eos", "eot", "eom") + _ends_by_name(file, vocab_size)
    return tuple(dict.fromkeys(ids))


def _ends_by_name(file: GGUFFile, vocab_size: int) -> tuple[int, ...]:
    tokens = file.metadata.get(f"{_KEY}tokens")
    types = file.metadata.get(f"{_KEY}token_type")
    if not isinstance(tokens, list) or not isinstance(types, np.ndarray):
        return ()
    controls = np.flatnonzero(types[: len(tokens)] == _CONTROL).tolist()
    ids = [token_id for token_id in controls if tokens[token_id] in _ENDS_OF_TURN]
    return id_list(ids, f"{file.path}: {_KEY}tokens", vocab_size)


def find_gguf_sampling(file: GGUFFile) -> dict[str, Any]:
    """Sampling defaults, under the names of :class:`SamplingParams`.

    Raises:
        CheckpointError: a value is out of its range.
    """
    found = {
        name: _shortest(file.metadata[key])
        for short, name in _SAMPLING_KEYS.items()
        if (key := f"general.sampling.{short}") in file.metadata
    }
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise CheckpointError(f"{file.path}: general.sampling: {error}") from error
    return found


def _shortest(value: Any) -> Any:
    """0.95, of what float32 makes of it. Arrays become lists, which are refused by what they are for."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(str(np.float32(value))) if isinstance(value, float) else value
