"""The last steps of the engine: what they computed, how long they took, what the memory looked like.

Made of the snapshots that the engine sends anyway, in the front end: so it is there after the engine has died,
however it did. Of the step in which it died there is no snapshot.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import pairwise
from typing import Any

import msgspec

from ..engine.stats import EngineStats

NUM_DUMPED = 32
"""Steps that are logged when the engine has died."""

logger = logging.getLogger(__name__)


class FlightRecorder:
    """Keeps the last ``num_steps`` snapshots that tell of a step."""

    def __init__(self, num_steps: int) -> None:
        self._seen: deque[tuple[float, EngineStats]] = deque(maxlen=num_steps + 1)
        self._last = EngineStats()

    def note(self, stats: EngineStats) -> None:
        """Take in a snapshot. Another engine's first one means that the engine before has died."""
        if stats.epoch != self._last.epoch:
            self.dump()
            self._seen.clear()
            self._last = EngineStats(epoch=stats.epoch)
        if stats.num_steps > self._last.num_steps:
            if not self._seen:
                self._seen.append((time.time(), self._last))
            self._seen.append((time.time(), stats))
        self._last = stats

    def steps(self) -> list[dict[str, Any]]:
        """The steps in order, the last one last."""
        return [
            _step(before, after, at, at - at_before)
            for (at_before, before), (at, after) in pairwise(self._seen)
        ]

    def dump(self) -> None:
        """Log the last steps, one line each."""
        steps = self.steps()[-NUM_DUMPED:]
        if steps:
            logger.error("The engine has died. Its last %d steps that are known:", len(steps))
        for step in steps:
            logger.error("%s", msgspec.json.encode(step).decode())


def _step(before: EngineStats, after: EngineStats, at: float, since: float) -> dict[str, Any]:
    """What happened between two snapshots: as a rule one step."""
    return {
        "step": after.num_steps,
        "num_steps": after.num_steps - before.num_steps,
        "epoch": after.epoch,
        "time": round(at, 3),
        "since_last_ms": round(1e3 * since, 3),
        "busy_ms": round(1e3 * (after.busy_s - before.busy_s), 3),
        "schedule_ms": round(1e3 * (after.schedule_s - before.schedule_s), 3),
        "num_scheduled_tokens": after.num_scheduled_tokens - before.num_scheduled_tokens,
        "num_prompt_tokens": after.num_prompt_tokens - before.num_prompt_tokens,
        "num_generation_tokens": after.num_generation_tokens - before.num_generation_tokens,
        "num_running": after.num_running,
        "num_waiting": after.num_waiting,
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        "num_used_blocks": after.num_used_blocks,
        "num_free_blocks": after.num_free_blocks,
        "num_cached_blocks": after.num_cached_blocks,
        "num_used_host_blocks": after.num_used_host_blocks,
        "num_block_copies": after.num_block_copies - before.num_block_copies,
        "num_evictions": after.num_evictions - before.num_evictions,
        "num_blocks_swapped_out": after.num_blocks_swapped_out - before.num_blocks_swapped_out,
        "num_blocks_swapped_in": after.num_blocks_swapped_in - before.num_blocks_swapped_in,
    }
