"""Beam searches of a real model, and an executor's candidates that make them happen again.

The record (``data/beam_parents.json``, made by ``record_beams.py``) says for each step of a search which beam
each next beam continues. A replayed search is longer than the record where the request is: then its later
part, from :data:`CYCLE_BEGIN` on, is gone through again and again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "data" / "beam_parents.json"
CYCLE_BEGIN = 32
"""Steps into a search, when its beginning is over: beams share a trunk and differ in their last tokens."""

Parents = tuple[int, ...]


class RecordedSearch:
    """The parents of each step's beams, best beam first."""

    def __init__(self, steps: list[Parents]) -> None:
        self.steps = steps
        self._cycle = steps[CYCLE_BEGIN:] or steps[1:] or steps

    def parents(self, step: int) -> Parents:
        """Which beam each beam of the next step continues."""
        if step < len(self.steps):
            return self.steps[step]
        return self._cycle[(step - len(self.steps)) % len(self._cycle)]

    def candidates(self, beam: int, step: int) -> tuple[tuple[int, float], ...]:
        """What the executor says may follow ``beam``, so that :class:`BeamSearch` goes on as recorded.

        Token ids are the beams' places in the next step. The search adds up log-probabilities; these make its
        ``i``-th beam's sum after every step ``-i`` less a multiple of ``2 * width``, so the best are
        those recorded, in their order. A beam that nobody continues has no candidates.
        """
        parents = self.parents(step)
        spread = 2 * len(parents)
        return tuple(
            (place, float(beam - place - spread))
            for place, parent in enumerate(parents)
            if parent == beam
        )


def load(path: Path = RECORD) -> dict[int, list[RecordedSearch]]:
    """All recorded searches by width."""
    record: dict[str, Any] = json.loads(path.read_text())
    searches: dict[int, list[RecordedSearch]] = {}
    for width, _, text in record["searches"]:
        steps = [tuple(map(int, step)) for step in text.split()]
        searches.setdefault(width, []).append(RecordedSearch(steps))
    return searches
