"""Alternation: every engine on the same work before any is asked for the next; the order turns each round."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .engines import Engine
from .machine import Neighbours
from .running import Running, running, turn

WARM_REPEAT = 1000  # texts that no round uses
START_REPEAT = 2000


def order(number_of_engines: int, round_number: int) -> list[int]:
    """Who comes when: forwards in even rounds, backwards in odd ones, so that no engine is always first."""
    forwards = list(range(number_of_engines))
    return forwards if round_number % 2 == 0 else forwards[::-1]


def measure(
    engines: Sequence[Engine], works: Sequence[str], rounds: int, ids: list[int], log_dir: Path
) -> dict[Engine, list[dict[str, Any]]]:
    """Samples of every engine: workloads with all engines up, then starts with one up at a time."""
    samples: dict[Engine, list[dict[str, Any]]] = {engine: [] for engine in engines}
    loads = [work for work in works if work != "start"]
    if loads:
        _measure_loads(engines, loads, rounds, ids, log_dir, samples)
    if "start" in works:
        _measure_starts(engines, rounds, ids, log_dir, samples, is_warm=bool(loads))
    return samples


def _measure_loads(
    engines: Sequence[Engine],
    works: Sequence[str],
    rounds: int,
    ids: list[int],
    log_dir: Path,
    samples: dict[Engine, list[dict[str, Any]]],
) -> None:
    with ExitStack() as stack:
        up: list[Running] = []
        for engine in engines:
            up.append(stack.enter_context(running(engine, log_dir)))
            up[-1].pause()
        for one in up:
            with turn(one):
                for work in ("W", *works):
                    one.ask(work, WARM_REPEAT, ids)
        for number in range(rounds):
            for work in works:
                for index in order(len(up), number):
                    one = up[index]
                    with turn(one):
                        watch = Neighbours(one.family())
                        sample = {**one.ask(work, number, ids), "work": work, "round": number}
                        sample["others_cpu"] = round(watch.share(), 3)
                    _note(one.engine, sample, samples)


def _measure_starts(
    engines: Sequence[Engine],
    rounds: int,
    ids: list[int],
    log_dir: Path,
    samples: dict[Engine, list[dict[str, Any]]],
    *,
    is_warm: bool,
) -> None:
    """Time to the first token, with every cache on disk filled by an earlier start, and memory."""
    if not is_warm:
        for engine in engines:
            with running(engine, log_dir):
                pass
    for number in range(rounds):
        for index in order(len(engines), number):
            with running(engines[index], log_dir) as one:
                for work in ("A", "B"):
                    one.ask(work, START_REPEAT + number, ids)
                sample = {
                    "work": "start",
                    "round": number,
                    "first_token_s": one.first_token_s,
                    "pss_mb": one.pss_bytes() / 1e6,
                }
            _note(engines[index], sample, samples)


def _note(
    engine: Engine, sample: dict[str, Any], samples: dict[Engine, list[dict[str, Any]]]
) -> None:
    samples[engine].append(sample)
    shown = {key: value for key, value in sample.items() if value is not None}
    print(f"{engine.label}: {shown}", file=sys.stderr, flush=True)
