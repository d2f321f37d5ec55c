"""``octavo models``: which models this machine has, as a table for people or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from ..engine.api import LocalModel
from ..engine.config.sizes import size_text
from ..engine.logs import one_line

_HEAD = ("MODEL", "ARCHITECTURE", "ON DISK", "WEIGHTS", "KV/1K TOKENS", "FITS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``octavo models`` takes."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", help="Folders and GGUF files to list as well."
    )
    parser.add_argument(
        "--download-dir",
        metavar="DIR",
        help="Folder in which models from the Hub are kept. Default: the Hub's cache.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, with all sizes in bytes.")


def render(models: Sequence[LocalModel], *, as_json: bool) -> str:
    """The models as text that ends with a line's end."""
    if as_json:
        return json.dumps([asdict(model) for model in models], indent=2) + "\n"
    if not models:
        return "There are no models: name a folder, or fetch one with octavo serve ORG/NAME.\n"
    rows = [_HEAD, *map(_row, models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join((*cells, row[-1])).rstrip())
    free = size_text(models[0].free_bytes)
    return "\n".join((*lines, f"{free} of memory are free.", ""))


def _row(model: LocalModel) -> tuple[str, ...]:
    name = model.name if model.revision in (None, "main") else f"{model.name} ({model.revision})"
    name = "".join(char if char.isprintable() else "?" for char in name)
    if model.problem is not None:
        problem = one_line(model.problem)
        return name, "-", size_text(model.size_bytes), "-", "-", f"no: {problem}"
    return (
        name,
        str(model.architecture),
        size_text(model.size_bytes),
        size_text(model.weight_bytes or 0),
        size_text(model.kv_bytes_per_1k_tokens or 0),
        _verdict(model),
    )


def _verdict(model: LocalModel) -> str:
    if not model.fits:
        return "no: the memory that is free does not hold it"
    if model.max_tokens == model.window:
        return f"yes, with its window of {model.window} tokens"
    return f"yes, with {model.max_tokens} of its {model.window} tokens"
