"""What an option is: a field of a frozen dataclass, checked when the object is built.

A field is a flag, a key of a preset in ``configs/`` and a keyword of ``LLM``. Its metadata says what
``--help`` prints.
"""

from __future__ import annotations

from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def option(
    default: Any,
    help: str,
    *,
    kind: str = "str",
    unit: str | None = None,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
    default_text: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag.

    ``kind`` is one of "str", "strs" (one or more), "int", "size" (an integer with an optional suffix
    k, m, g: powers of 1000, ki, mi, gi: powers of 1024), "float", "bool" (a switch).
    ``default_text`` says in words what ``None`` becomes.
    """
    meta = {
        "help": help,
        "kind": kind,
        "unit": unit,
        "choices": choices,
        "least": least,
        "most": most,
        "default_text": default_text,
        "secret": secret,
    }
    return field(default=default, metadata=meta)


def flag_of(name: str) -> str:
    """The flag of a field: ``max_num_seqs`` → ``--max-num-seqs``."""
    return "--" + name.replace("_", "-")


class Checked:
    """Checks every option against its metadata when built."""

    def __post_init__(self) -> None:
        for option_field in _fields(self):
            _check_option(option_field, getattr(self, option_field.name))


def _fields(config: Any) -> tuple[Field[Any], ...]:
    return tuple(f for f in fields(config) if "kind" in f.metadata)


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "size": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str, Path),
    "strs": (tuple,),
}


def _check_option(option_field: Field[Any], value: Any) -> None:
    meta, flag = option_field.metadata, flag_of(option_field.name)
    if value is None:
        if option_field.default is not None:
            raise ConfigError(f"{flag} needs a value.")
        return
    kind = meta["kind"]
    expected = _PYTHON_TYPES.get(kind)
    if expected and (
        not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool")
    ):
        raise ConfigError(f"{flag} must be of kind {kind}, got {value!r}.")
    if kind == "strs" and not (value and all(isinstance(text, str) for text in value)):
        raise ConfigError(f"{flag} must hold at least one text.")
    if meta["choices"] is not None and value not in meta["choices"]:
        raise ConfigError(f"{flag} must be one of {', '.join(meta['choices'])}, got {value!r}.")
    if kind in ("int", "size", "float"):
        _check_bounds(flag, value, meta["least"], meta["most"])


def _check_bounds(flag: str, value: float, least: float | None, most: float | None) -> None:
    if not -(2**63) <= value < 2**63:  # NaN is not, either
        raise ConfigError(f"{flag} must be a number within 64 bits.")
    if least is not None and value < least:
        raise ConfigError(f"{flag} must be at least {least:g}, got {value:g}.")
    if most is not None and value > most:
        raise ConfigError(f"{flag} must be at most {most:g}, got {value:g}.")
