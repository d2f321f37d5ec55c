"""Cost of scheduling and bookkeeping a step over many running sequences, with a fake executor.

    python benchmarks/scheduler_step.py [--sequences 256] [--steps 400] [--no-prefix-caching]
    python benchmarks/scheduler_step.py --compare [--json PATH]

The fake executor returns a prepared token per row, so what is timed is ``schedule()`` and ``commit()``
alone. Prints the median and 99th percentile over the steps, in milliseconds.

``--compare`` steps two schedulers in turn, one with the prefix cache and one without, over prompts that have
nothing in common, and prints what the cache costs when nothing hits: while all sequences decode, and while
2048 prompt tokens are computed in each step. All is done five times, and of each step the fastest counts, in CPU
time of the thread: others on the machine, and the garbage collector, are left out. ``step_ms_for_1_percent`` is how
long a step must last for the cache to cost 1% of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from octavo.engine.api import SamplingParams
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.request import NewRequest
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.step import RowResult, StepPlan, StepResult

BUDGET = 2048
PREFILL_PROMPT = 500
REPEATS = 5


def execute(plan: StepPlan) -> StepResult:
    return StepResult(
        plan.step_id, tuple(RowResult(row.seq_id, (7,)) for row in plan.rows if row.num_samples)
    )


def prepared(
    num_requests: int,
    prompt_lengths: range,
    max_tokens: int,
    *,
    num_seqs: int,
    num_blocks: int,
    enable_prefix_caching: bool,
) -> Scheduler:
    """A scheduler with all requests waiting; no two prompts begin alike."""
    memory = KVCacheManager(num_blocks, 16, enable_prefix_caching=enable_prefix_caching)
    limits = SchedulerLimits(max(BUDGET, num_seqs), num_seqs, 8192, 0.01)
    scheduler = Scheduler(limits, memory, (2,))
    sampling = SamplingParams(max_tokens=max_tokens)
    random = Random(1)
    for i in range(num_requests):
        length = prompt_lengths[i % len(prompt_lengths)]
        prompt = [random.randrange(3, 50_000) for _ in range(length)]
        scheduler.add(NewRequest(str(i), prompt, sampling, 0, 0.0))
    return scheduler


def decoding(sequences: int, steps: int, *, enable_prefix_caching: bool) -> Scheduler:
    """Prompts of 8 to 23 tokens, so that as many blocks are filled in each step as in any other."""
    return prepared(
        sequences,
        range(8, 24),
        steps + 100,
        num_seqs=sequences,
        num_blocks=sequences * max(64, (steps + 140) // 16),
        enable_prefix_caching=enable_prefix_caching,
    )


def prefilling(sequences: int, steps: int, *, enable_prefix_caching: bool) -> Scheduler:
    """Prompts of about 500 tokens and one token of output: a full budget in each step, blocks evicted."""
    return prepared(
        (steps + 10) * BUDGET // PREFILL_PROMPT,
        range(PREFILL_PROMPT - 8, PREFILL_PROMPT + 8),
        1,
        num_seqs=sequences,
        num_blocks=1024,
        enable_prefix_caching=enable_prefix_caching,
    )


def step(scheduler: Scheduler, clock: Callable[[], float]) -> tuple[StepPlan, float]:
    """One step; the seconds exclude the executor."""
    begin = clock()
    plan = scheduler.schedule()
    scheduled = clock()
    result = execute(plan)
    executed = clock()
    scheduler.commit(plan, result)
    return plan, scheduled - begin + clock() - executed


def decode_times(sequences: int, steps: int, *, enable_prefix_caching: bool) -> list[float]:
    """Milliseconds of steps in which every sequence decodes."""
    scheduler = decoding(sequences, steps, enable_prefix_caching=enable_prefix_caching)
    times = []
    for _ in range(steps):
        plan, seconds = step(scheduler, time.perf_counter)
        if len(plan.rows) == sequences and not plan.new_rows:
            times.append(seconds * 1e3)
    return times


def compare(build: Callable[..., Scheduler], sequences: int, steps: int) -> dict[str, Any]:
    """What the prefix cache adds to a step where nothing hits."""
    fastest: dict[tuple[bool, int], float] = {}
    for _ in range(REPEATS):
        schedulers = {on: build(sequences, steps, enable_prefix_caching=on) for on in (False, True)}
        for number in range(steps):
            for is_on in (True, False) if number % 2 else (False, True):
                plan, seconds = step(schedulers[is_on], time.thread_time)
                if plan.rows and not (build is decoding and plan.new_rows):
                    key = is_on, number
                    fastest[key] = min(seconds, fastest.get(key, seconds))
        assert not schedulers[True].counters.prefix_cache_hits
    without, cached = (
        statistics.mean(seconds for (on, _), seconds in fastest.items() if on is is_on) * 1e6
        for is_on in (False, True)
    )
    return {
        "work": build.__name__,
        "without_us": round(without, 1),
        "cost_us": round(cached - without, 1),
        "share_of_scheduling": round(cached / without - 1, 3),
        "step_ms_for_1_percent": round((cached - without) / 10, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--json", type=Path, metavar="PATH", help="of --compare")
    args = parser.parse_args()
    if args.compare:
        lines = [compare(build, args.sequences, args.steps) for build in (decoding, prefilling)]
        for line in lines:
            print(json.dumps(line))
        if args.json:
            command = (
                f"python benchmarks/scheduler_step.py --compare --sequences {args.sequences} "
                f"--steps {args.steps} --json FILE"
            )
            args.json.write_text(json.dumps({"command": command, "work": lines}, indent=1) + "\n")
        return
    times = decode_times(args.sequences, args.steps, enable_prefix_caching=args.prefix_caching)
    print(
        json.dumps(
            {
                "sequences": args.sequences,
                "steps": len(times),
                "prefix_caching": args.prefix_caching,
                "median_ms": round(statistics.median(times), 3),
                "p99_ms": round(statistics.quantiles(times, n=100)[98], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
