"""octavo without a peer, over HTTP: long contexts, eight samples, beams, one thread, the kernels in PyTorch."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from serve import Work, request, summary, window

from .engines import SERVED_NAME, Engine, octavo
from .figures import FIGURES, Figure, round_figures, spread
from .machine import Neighbours
from .running import HttpRunning, running

NUM_OUTPUT_TOKENS = 64
_ONE_THREAD = (("OMP_NUM_THREADS", "1"),)

_CONTEXT = (
    Figure("prompt tokens", "tokens/s", "prefill_tokens_per_s", True),
    Figure("decode tokens", "tokens/s", "decode_tokens_per_s", True),
)
_CHOICES = (Figure("output tokens of all choices", "tokens/s", "output_tokens_per_s", True),)

Probe = Callable[[HttpRunning, int, list[int]], dict[str, Any]]


def measure(rounds: int, ids: list[int], models_dir: Path, log_dir: Path) -> list[dict[str, Any]]:
    """Rows for every form: ``form``, ``work``, ``figure``, ``unit``, ``median``, ``range``, ``repeats``."""
    rows: list[dict[str, Any]] = []
    for form in ("bf16", "q4_1", "float32"):
        engine = octavo(form, "http", models_dir)
        rows += _measure_form(form, engine, rounds, ids, log_dir, {**_long(), **_choices()})
    for form in ("bf16", "q4_1"):
        engine = octavo(form, "http", models_dir)
        single = Engine("octavo", f"{form} one thread", "http", engine.command, _ONE_THREAD)
        rows += _measure_form(single.precision, single, rounds, ids, log_dir, _loads("ABD"))
    fallback = octavo("torch bf16", "http", models_dir)
    rows += _measure_form("torch bf16", fallback, rounds, ids, log_dir, _loads("ABD"))
    return rows


def _measure_form(
    form: str,
    engine: Engine,
    rounds: int,
    ids: list[int],
    log_dir: Path,
    probes: dict[str, tuple[Sequence[Figure], Probe]],
) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in probes}
    with running(engine, log_dir) as server:
        if not isinstance(server, HttpRunning):
            raise TypeError("octavo alone is measured over HTTP")
        server.ask("W", 0, ids)
        for number in range(rounds):
            for name, (_, probe) in probes.items():
                watch = Neighbours(server.family())
                found[name].append(probe(server, number, ids))
                found[name][-1]["others_cpu"] = round(watch.share(), 3)
    return [
        make_row(form, name, figure, [sample[figure.key] for sample in samples])
        | {"others_cpu": max(sample["others_cpu"] for sample in samples)}
        for name, samples in found.items()
        for figure in probes[name][0]
    ]


def make_row(form: str, work: str, figure: Figure, values: Sequence[float]) -> dict[str, Any]:
    return {
        "form": form,
        "work": work,
        "figure": figure.name,
        "unit": figure.unit,
        "median": round_figures(statistics.median(values)),
        "range": spread(values),
        "repeats": len(values),
    }


def _loads(names: str) -> dict[str, tuple[Sequence[Figure], Probe]]:
    def probe(name: str) -> Probe:
        return lambda server, number, ids: server.ask(name, number, ids)

    return {name: (FIGURES[name], probe(name)) for name in names}


def _long() -> dict[str, tuple[Sequence[Figure], Probe]]:
    def probe(length: int) -> Probe:
        return lambda server, number, ids: _long_context(server, length, number, ids)

    return {f"context {length}": (_CONTEXT, probe(length)) for length in (2048, 4096)}


def _choices() -> dict[str, tuple[Sequence[Figure], Probe]]:
    return {
        "n = 8, prompt 512": (_CHOICES, lambda *args: _ask_choices(*args, 8, is_search=False)),
        "beam width 4, prompt 512": (
            _CHOICES,
            lambda *args: _ask_choices(*args, 4, is_search=True),
        ),
    }


def _long_context(server: HttpRunning, length: int, number: int, ids: list[int]) -> dict[str, Any]:
    """One stream: the prompt's tokens over the time to the first token, then the rate of the others."""
    prompt = window(random.Random(f"{length} {number}"), ids, length)

    async def ask() -> dict[str, Any]:
        async with httpx.AsyncClient() as client:
            work = Work(prompt, NUM_OUTPUT_TOKENS)
            return await request(client, server.url, SERVED_NAME, work)

    begin = time.perf_counter()
    result = asyncio.run(ask())
    figures = summary([result], time.perf_counter() - begin)
    return {**figures, "prefill_tokens_per_s": length / result["ttft"]}


def _ask_choices(
    server: HttpRunning, number: int, ids: list[int], width: int, *, is_search: bool
) -> dict[str, Any]:
    body = {
        "model": SERVED_NAME,
        "prompt": window(random.Random(f"choices {is_search} {number}"), ids, 512),
        "n": width,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "ignore_eos": True,
    }
    drawn = {"temperature": 1.0, "seed": number}
    body |= {"use_beam_search": True, "temperature": 0} if is_search else drawn
    begin = time.perf_counter()
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)
    seconds = time.perf_counter() - begin
    answer.raise_for_status()
    return {"output_tokens_per_s": width * NUM_OUTPUT_TOKENS / seconds}
