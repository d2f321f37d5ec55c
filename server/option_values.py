"""From a flag's text, or a preset's value, to the value of an option.

Every refusal is one sentence that names the flag and, unless the option is secret, the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field
from typing import Any

from ..engine.config.options import flag_of
from ..engine.config.sizes import parse_size
from ..engine.errors import ConfigError

_KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "size": (parse_size, "a whole number, as in 4096, 32k or 2GiB"),
    "float": (float, "a number"),
}


def parse_text(option: Field[Any], text: str) -> Any:
    """The value of one command-line argument.

    Raises:
        ConfigError: the text is not of the option's kind.
    """
    parse, expected = _KINDS.get(option.metadata["kind"], (str, ""))
    try:
        return parse(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{flag_of(option.name)} must be {expected}, got {_shown(option, text)}."
        ) from None


def parse_file_value(option: Field[Any], value: Any) -> Any:
    """The value of a preset's key. Sizes may be written as on the command line.

    Raises:
        ConfigError: the value is not of the option's kind.
    """
    kind = option.metadata["kind"]
    if kind == "strs" and value is not None:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
            raise ConfigError(f"{flag_of(option.name)} must be a text or a list of texts.")
        return tuple(values)
    if kind == "size" and isinstance(value, str):
        return parse_text(option, value)
    return value


def _shown(option: Field[Any], text: str) -> str:
    return "another value" if option.metadata["secret"] else repr(text)
