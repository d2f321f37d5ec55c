"""An engine process without a model: the real loop, scheduler and memory over a canned executor.

Usage: fake_engine.py MODE. Each token is the previous one plus one, modulo 256. Where log-probabilities are
asked for, a token has minus (seed % 8 + 1), the seed being its sequence's own. A beam's candidates are the
next tokens in order, with -1, -2, ... MODE is a comma list of
``slow`` (20 ms a step), ``crash`` (exit in the fifth step), ``raise`` (an error in the fifth step),
``poison`` (exit where token 200 would be drawn), ``hang`` (the first engine never ends its fifth step),
``unloadable`` (a ConfigError while loading), ``unloadable-again`` (the second time only),
``stuck`` (never ready), ``stuck-again`` (but not the first time).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from octavo.engine.api import EngineInfo
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.errors import ConfigError
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.service.core import EngineCore
from octavo.engine.service.process import run
from octavo.engine.step import RowResult, SampleLogprobs, ScheduledRow, StepPlan, StepResult

MODES = set(sys.argv[1].split(",")) if len(sys.argv) > 1 else set()
EOS = 256
POISON = 200


class Executor:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.last: dict[int, int] = {}
        self.seeds: dict[int, int] = {}  # of sequences whose log-probabilities are asked for
        self.num_steps = 0

    def submit(self, plan: StepPlan) -> Executor:
        self.num_steps += 1
        if "slow" in MODES:
            time.sleep(0.02)
        if "crash" in MODES and self.num_steps == 5:
            os._exit(7)
        if "raise" in MODES and self.num_steps == 5:
            raise RuntimeError("the kernel broke")
        if "hang" in MODES and self.num_steps == 5 and self.epoch == 0:
            time.sleep(600)
        for fork in plan.forks:
            self.last[fork.child_seq_id] = self.last[fork.parent_seq_id]
            if fork.parent_seq_id in self.seeds:
                self.seeds[fork.child_seq_id] = fork.seed
        for new in plan.new_rows:
            self.last[new.seq_id] = [*new.prompt_token_ids, *new.output_token_ids][-1]
            if new.sampling.needs_logprobs:
                self.seeds[new.seq_id] = new.seed
        rows = [self.compute(row) for row in plan.rows if row.num_samples or row.num_candidates]
        self.pending = StepResult(plan.step_id, tuple(rows))
        return self

    def compute(self, row: ScheduledRow) -> RowResult:
        if row.appended_token_ids:
            self.last[row.seq_id] = row.appended_token_ids[-1]
        following = (self.last[row.seq_id] + 1) % 256
        if "poison" in MODES and following == POISON:
            os._exit(9)
        if row.num_candidates:
            candidates = [((following + i) % 256, -1.0 - i) for i in range(row.num_candidates)]
            return RowResult(row.seq_id, (), candidates=tuple(candidates))
        self.last[row.seq_id] = following
        seed, logprobs = self.seeds.get(row.seq_id), None
        if seed is not None:
            seeds = range(seed, seed + row.num_samples)
            logprobs = [SampleLogprobs(-1.0 - seed % 8, 1, ()) for seed in seeds]
        return RowResult(row.seq_id, (following,) * row.num_samples, logprobs)

    def result(self) -> StepResult:
        return self.pending


def build_core(
    config: EngineConfig, epoch: int, progress: Callable[[str, float], None]
) -> tuple[EngineCore, EngineInfo]:
    progress("loading", 0.5)
    if "unloadable" in MODES or ("unloadable-again" in MODES and epoch == 1):
        raise ConfigError("--model: this cannot be loaded.")
    if "stuck" in MODES or ("stuck-again" in MODES and epoch):
        time.sleep(60)
    num_blocks = config.cache.num_gpu_blocks_override or 64
    scheduler = Scheduler(
        SchedulerLimits(64, 8, 512), KVCacheManager(num_blocks, 16), eos_token_ids=(EOS,)
    )
    core = EngineCore(scheduler, Executor(epoch), epoch=epoch, check_invariants=True)
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
