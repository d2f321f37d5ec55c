"""Typed reading of untrusted key-value data: every refusal names the file and the key."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MAX_SIZE = 2**31 - 1
MAX_SHOWN = 200  # characters of a value in a message


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold one JSON object.")
    return value


class Fields:
    """A mapping read with checks. A key that is absent or ``None`` takes its default."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer below 2^31.

        Raises:
            CheckpointError: absent without a default, or something else.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            self.refuse(key, value, "a positive integer below 2^31")
        return int(value)

    def size_or_none(self, key: str) -> int | None:
        """As :meth:`size`; ``None`` if absent or zero.

        Raises:
            CheckpointError: something else.
        """
        value = self.values.get(key)
        is_zero = isinstance(value, int) and value == 0
        return None if value is None or is_zero else self.size(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number.

        Raises:
            CheckpointError: absent without a default, or something else.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(key, value, "a positive number")
        if not 0 < value <= sys.float_info.max:
            self.refuse(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean.

        Raises:
            CheckpointError: something else.
        """
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string on one line.

        Raises:
            CheckpointError: absent without a default, or something else.
        """
        value = self._value(key, default)
        if not isinstance(value, str) or not value.isprintable():
            self.refuse(key, value, "a string on one line")
        return str(value)

    def refuse(self, key: str, value: Any, expected: str) -> None:
        raise CheckpointError(f"{self.where}: {key} must be {expected}, got {_shown(value)}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.where} lacks {key}.")
        return default


def _shown(value: Any) -> str:
    """A value on one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def id_list(value: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    """A token id, a list of them or ``None``, as a tuple.

    Args:
        where: the file and the key, for messages.

    Raises:
        CheckpointError: something else, or an id outside the vocabulary.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(
                f"{where} must be a token id or a list of them, got {_shown(value)}."
            )
        check_id(token_id, where, vocab_size)
    return tuple(ids)


def check_id(token_id: int, where: str, vocab_size: int) -> None:
    """Whether the model has a row for the token that ``where`` names.

    Raises:
        CheckpointError: it has none.
    """
    if token_id >= vocab_size:
        raise CheckpointError(
            f"{where} names the token {token_id}, which is outside the vocabulary of {vocab_size}."
        )
