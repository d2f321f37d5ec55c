"""One line of statistics now and then, for whoever reads the log."""

from __future__ import annotations

import asyncio
import logging
import time

from ..engine.api import Engine
from ..engine.stats import EngineStats

logger = logging.getLogger(__name__)


async def log_stats(engine: Engine, interval_s: float) -> None:
    """Log a line every ``interval_s``, but none while nothing happens."""
    line, stats = StatsLine(time.monotonic()), EngineStats()
    while True:
        await asyncio.sleep(interval_s)
        stats = engine.stats() or stats
        if (text := line.of(stats, time.monotonic())) is not None:
            logger.info("%s", text)


class StatsLine:
    """What has changed since the last time, as rates."""

    def __init__(self, now: float) -> None:
        self._last, self._time = EngineStats(), now

    def of(self, stats: EngineStats, now: float) -> str | None:
        """The line; ``None`` if nothing runs and nothing has happened."""
        before, passed_s = self._last, max(1e-3, now - self._time)
        if stats.epoch != before.epoch:
            before = EngineStats(epoch=stats.epoch)
        self._last, self._time = stats, now
        if stats.num_steps == before.num_steps and not stats.num_running + stats.num_waiting:
            return None
        prompt = (stats.num_prompt_tokens - before.num_prompt_tokens) / passed_s
        generation = (stats.num_generation_tokens - before.num_generation_tokens) / passed_s
        queries = stats.prefix_cache_queries - before.prefix_cache_queries
        hits = stats.prefix_cache_hits - before.prefix_cache_hits
        used = stats.num_used_blocks / max(1, stats.num_blocks)
        return (
            f"running {stats.num_running}, waiting {stats.num_waiting}, KV blocks used {used:.1%}, "
            f"prompt {prompt:.1f} tokens/s, generation {generation:.1f} tokens/s, "
            f"prefix hits {hits / max(1, queries):.1%}, "
            f"preemptions {stats.num_preemptions - before.num_preemptions}, "
            f"steps {stats.num_steps - before.num_steps}"
        )
