"""The engine's statistics on their way to the metrics.

Owns the last snapshot, which callers may look at, and the sink that is told of each.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ..stats import EngineStats, StatsSink
from .output import RequestState


class StatsRelay:
    """Keeps the last statistics, and passes them on where there is a sink."""

    def __init__(self) -> None:
        self.last: EngineStats | None = None
        self.sink: StatsSink | None = None

    def record_step(self, stats: EngineStats, num_step_tokens: int) -> None:
        """A step has been computed."""
        self.last = stats
        if self.sink is not None:
            self.sink.record_step(stats, num_step_tokens)

    def record_stats(self, stats: EngineStats) -> None:
        """A snapshot has come outside a step."""
        self.last = stats
        if self.sink is not None:
            self.sink.record_stats(stats)

    def record_finished(self, state: RequestState) -> None:
        """A request has ended."""
        if self.sink is not None:
            self.sink.record_finished(state.record(time.monotonic()))

    def empty_gauges(self, num_waiting: int) -> None:
        """Nothing runs and no block is in use."""
        if self.last is None:
            return
        empty = replace(
            self.last,
            num_running=0,
            num_waiting=num_waiting,
            num_used_blocks=0,
            num_used_slots=0,
            num_cached_blocks=0,
            num_shared_blocks=0,
            num_saved_blocks=0,
            num_used_host_blocks=0,
        )
        self.record_stats(empty)
