"""The result file: a list of runs, each with its machine, and the rows found on it.

``{"runs": [{"date", "machine", "versions", "rounds", "rows": [...], "alone": [...], "samples": [...]}]}``. A run is
added for each call of ``compare.py``; of rows for the same comparison the last counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    return content


def add_run(path: Path, run: dict[str, Any]) -> None:
    content = load(path)
    content["runs"].append(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def latest(content: dict[str, Any], kind: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of all runs under ``kind``; where ``keys`` agree, the last one, in the place of the first."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in content["runs"]:
        for row in run.get(kind, ()):
            found[tuple(row[key] for key in keys)] = row
    return list(found.values())
