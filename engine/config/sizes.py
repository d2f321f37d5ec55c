"""Sizes as people write and read them."""

from __future__ import annotations

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """``"32k"`` → 32000, ``"4Ki"`` → 4096, ``"2GiB"`` → 2147483648.

    Raises:
        ValueError: not a whole number with a known suffix.
    """
    cleaned = text.strip().lower().removesuffix("b")
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if cleaned.endswith(suffix):
            value = float(cleaned.removesuffix(suffix)) * _SUFFIXES[suffix]
            break
    else:
        value = float(cleaned)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def size_text(num_bytes: float) -> str:
    """``1500000`` → ``"1.5 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
