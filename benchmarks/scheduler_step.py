"""Cost of scheduling and bookkeeping a step over many running sequences, with a fake executor.

    python benchmarks/scheduler_step.py [--sequences 256] [--steps 400]

The fake executor returns a prepared token per row, so what is timed is ``schedule()`` and ``commit()``
alone. Prints the median and 99th percentile over the steps, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from octavo.engine.api import SamplingParams
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.request import NewRequest
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.step import RowResult, StepPlan, StepResult


def execute(plan: StepPlan) -> StepResult:
    return StepResult(
        plan.step_id, tuple(RowResult(row.seq_id, (7,)) for row in plan.rows if row.num_samples)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    memory = KVCacheManager(args.sequences * 64, 16)
    limits = SchedulerLimits(max(2048, args.sequences), args.sequences, 8192, 0.01)
    scheduler = Scheduler(limits, memory, (2,))
    sampling = SamplingParams(max_tokens=args.steps + 100)
    for i in range(args.sequences):
        scheduler.add(NewRequest(str(i), [5] * 8, sampling, 0, 0.0))
    times = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        result = execute(plan)
        executed = time.perf_counter()
        scheduler.commit(plan, result)
        end = time.perf_counter()
        if len(plan.rows) == args.sequences and not plan.new_rows:
            times.append((scheduled - begin + end - executed) * 1e3)
    print(
        json.dumps(
            {
                "sequences": args.sequences,
                "steps": len(times),
                "median_ms": round(statistics.median(times), 3),
                "p99_ms": round(statistics.quantiles(times, n=100)[98], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
