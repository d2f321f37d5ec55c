"""An engine process that computes nothing: the real loop and scheduler, and tokens out of a text.

``canned_engine.py STEP_MS`` takes a step that long. Started by the front end under test, as the real one is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from octavo.engine.api import EngineInfo
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.service.core import EngineCore
from octavo.engine.service.process import run
from octavo.engine.step import RowResult, StepPlan, StepResult

WINDOW, MAX_SEQS, BLOCK_SIZE, NUM_BLOCKS = 1 << 16, 256, 16, 1 << 16
TOKEN_IDS = range(400, 1424)
"""Ids that are drawn in turn: common pieces of words in the embedded model's vocabulary."""


class Executor:
    """Gives each row the next id, one step per tick."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next_tick = time.monotonic()

    def submit(self, plan: StepPlan) -> Executor:
        now = time.monotonic()
        self._next_tick = max(self._next_tick + self._step_s, now)
        time.sleep(self._next_tick - now)
        following = TOKEN_IDS[plan.step_id % len(TOKEN_IDS)]
        rows = [
            RowResult(row.seq_id, (following,) * row.num_samples)
            for row in plan.rows
            if row.num_samples
        ]
        self._result = StepResult(plan.step_id, tuple(rows))
        return self

    def result(self) -> StepResult:
        return self._result


def build_core(
    _config: EngineConfig, epoch: int, _progress: Callable[[str, float], None]
) -> tuple[EngineCore, EngineInfo]:
    scheduler = Scheduler(
        SchedulerLimits(WINDOW, MAX_SEQS, WINDOW), KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), ()
    )
    core = EngineCore(scheduler, Executor(float(sys.argv[1]) / 1000), epoch=epoch)
    info = EngineInfo(
        model="canned",
        architecture="Canned",
        max_model_len=WINDOW,
        vocab_size=49152,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        kv_cache_bytes=0,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=WINDOW,
        dtype="none",
        device="none",
        attention_backend="none",
        num_threads=1,
        num_parameters=0,
        load_s=0.0,
    )
    return core, info


if __name__ == "__main__":
    sys.exit(run(build_core))
