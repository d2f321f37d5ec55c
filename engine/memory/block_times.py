"""How long cached blocks live and how long they lie idle before their memory is taken."""

from __future__ import annotations

from bisect import bisect_left

from ..stats import BLOCK_TIME_BUCKETS, HistogramCounts


class Histogram:
    """Counts seconds into :data:`~octavo.engine.stats.BLOCK_TIME_BUCKETS`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BLOCK_TIME_BUCKETS) + 1)
        self._total_s = 0.0
        self._snapshot: HistogramCounts | None = HistogramCounts()

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BLOCK_TIME_BUCKETS, seconds)] += 1
        self._total_s += seconds
        self._snapshot = None

    def counts(self) -> HistogramCounts:
        """What was observed so far; the same object until something is."""
        if self._snapshot is None:
            self._snapshot = HistogramCounts(tuple(self._counts), self._total_s)
        return self._snapshot


class BlockTimes:
    """When each block was allocated and last released, by a clock that the caller sets."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self.lifetimes = Histogram()
        self.idle_times = Histogram()
        self._allocated = [0.0] * num_blocks
        self._released = [0.0] * num_blocks

    def allocated(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._allocated[block_id] = self.now

    def released(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._released[block_id] = self.now

    def evicted(self, block_id: int) -> None:
        self.lifetimes.observe(self.now - self._allocated[block_id])
        self.idle_times.observe(self.now - self._released[block_id])
