"""Refusals of a caller's values, which name the parameter."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import InvalidRequestError

_MAX_FLOAT = sys.float_info.max


def refuse(param: str, message: str) -> None:
    """Raise the error of a bad ``param``."""
    raise InvalidRequestError(message, param=param)


def check_int(param: str, value: Any) -> None:
    """Refuse what is no integer; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(param, f"{param} must be an integer, got {value!r}.")


def check_finite(param: str, value: Any) -> None:
    """Refuse what is no finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not -_MAX_FLOAT <= value <= _MAX_FLOAT:
        refuse(param, f"{param} must be a finite number, got {value!r}.")


def check_range(param: str, value: Any, least: float, most: float) -> None:
    """Refuse what is not within ``[least, most]``."""
    check_finite(param, value)
    if not least <= value <= most:
        refuse(param, f"{param} must be in [{least:g}, {most:g}], got {value}.")
