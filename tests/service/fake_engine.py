"""An engine process without a model: the real loop, scheduler and memory over a canned executor.

Usage: fake_engine.py MODE. Each token is the previous one plus one, modulo 256. MODE is a comma list of
``slow`` (20 ms a step), ``crash`` (exit in the fifth step), ``raise`` (an error in the fifth step),
``unloadable`` (a ConfigError while loading), ``stuck`` (never ready).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from octavo.engine.api import EngineInfo
from octavo.engine.config import EngineConfig
from octavo.engine.errors import ConfigError
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.service.core import EngineCore
from octavo.engine.service.process import run
from octavo.engine.step import RowResult, StepPlan, StepResult

MODES = set(sys.argv[1].split(",")) if len(sys.argv) > 1 else set()
EOS = 256


class Executor:
    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.num_steps = 0

    def submit(self, plan: StepPlan) -> Executor:
        self.num_steps += 1
        if "slow" in MODES:
            time.sleep(0.02)
        if "crash" in MODES and self.num_steps == 5:
            os._exit(7)
        if "raise" in MODES and self.num_steps == 5:
            raise RuntimeError("the kernel broke")
        for new in plan.new_rows:
            self.last[new.seq_id] = [*new.prompt_token_ids, *new.output_token_ids][-1]
        rows = []
        for row in plan.rows:
            if row.num_samples:
                self.last[row.seq_id] = (self.last[row.seq_id] + 1) % 256
                rows.append(RowResult(row.seq_id, (self.last[row.seq_id],)))
        self.pending = StepResult(plan.step_id, tuple(rows))
        return self

    def result(self) -> StepResult:
        return self.pending


def build_core(
    config: EngineConfig, epoch: int, progress: Callable[[str, float], None]
) -> tuple[EngineCore, EngineInfo]:
    progress("loading", 0.5)
    if "unloadable" in MODES:
        raise ConfigError("--model: this cannot be loaded.")
    if "stuck" in MODES:
        time.sleep(60)
    num_blocks = config.cache.num_gpu_blocks_override or 64
    scheduler = Scheduler(
        SchedulerLimits(64, 8, 512), KVCacheManager(num_blocks, 16), eos_token_ids=(EOS,)
    )
    core = EngineCore(scheduler, Executor(), epoch=epoch, check_invariants=True)
    info = EngineInfo(
        model="fake",
        architecture="Fake",
        max_model_len=512,
        vocab_size=259,
        eos_token_ids=(EOS,),
        block_size=16,
        num_blocks=num_blocks,
        kv_cache_bytes=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
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
