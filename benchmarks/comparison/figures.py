"""Which figures a workload gives, and how two engines' repeats become one row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    key: str  # in a sample
    is_more_better: bool


def _rate(name: str, key: str, unit: str = "tokens/s") -> Figure:
    return Figure(name, unit, key, is_more_better=True)


def _cost(name: str, key: str, unit: str = "s") -> Figure:
    return Figure(name, unit, key, is_more_better=False)


FIGURES: dict[str, tuple[Figure, ...]] = {
    "A": (_rate("output tokens", "output_tokens_per_s"),),
    "B": (_rate("decode tokens", "decode_tokens_per_s"), _cost("TTFT", "ttft_p50_s")),
    "C": (_cost("time, cold cache", "seconds"),),
    "D": (_rate("prompt tokens", "prompt_tokens_per_s"),),
    "E": (
        _rate("requests", "requests_per_s", "requests/s"),
        _cost("TTFT p50", "ttft_p50_s"),
        _cost("TTFT p95", "ttft_p95_s"),
        _cost("ITL p50", "itl_p50_s"),
        _cost("ITL p95", "itl_p95_s"),
    ),
    "start": (
        _cost("process start to first token", "first_token_s"),
        _cost("memory after A and B, PSS", "pss_mb", "MB"),
    ),
}


def ratio(octavo: float, peer: float, *, is_more_better: bool) -> float:
    """How many times better octavo is: above 1 it is better, whatever the figure."""
    return octavo / peer if is_more_better else peer / octavo


def make_row(
    work: str, figure: Figure, octavo: Sequence[float], peer: Sequence[float]
) -> dict[str, Any]:
    """One comparison, from repeats that were taken in the same rounds.

    ``ratio`` is of the medians; ``ratio_range`` is that of the ratios within each round.
    """
    medians = statistics.median(octavo), statistics.median(peer)
    rounds = [
        ratio(ours, theirs, is_more_better=figure.is_more_better)
        for ours, theirs in zip(octavo, peer, strict=True)
    ]
    return {
        "work": work,
        "figure": figure.name,
        "unit": figure.unit,
        "octavo": round_figures(medians[0]),
        "peer": round_figures(medians[1]),
        "ratio": round(ratio(*medians, is_more_better=figure.is_more_better), 3),
        "octavo_range": spread(octavo),
        "peer_range": spread(peer),
        "ratio_range": [round(min(rounds), 3), round(max(rounds), 3)],
        "repeats": len(octavo),
    }


def make_rows(
    octavo: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for every figure of every workload in both engines' samples (``work``, ``round``, figures)."""
    rows = []
    for work, figures in FIGURES.items():
        ours, theirs = ([s for s in side if s["work"] == work] for side in (octavo, peer))
        common = sorted({s["round"] for s in ours} & {s["round"] for s in theirs})
        for figure in figures if common else ():
            values = [_values(side, figure.key, common) for side in (ours, theirs)]
            if None not in (*values[0], *values[1]):
                rows.append(make_row(work, figure, *values) | _others(ours, theirs))
    return rows


def _others(*sides: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The most CPU time that other processes took during one of these samples, where that was watched."""
    shares = [s["others_cpu"] for side in sides for s in side if "others_cpu" in s]
    return {"others_cpu": max(shares)} if shares else {}


def _values(samples: Sequence[dict[str, Any]], key: str, rounds: Sequence[int]) -> list[Any]:
    by_round = {sample["round"]: sample[key] for sample in samples}
    return [by_round[number] for number in rounds]


def spread(values: Sequence[float]) -> list[float]:
    return [round_figures(min(values)), round_figures(max(values))]


def round_figures(value: float) -> float:
    """Four significant figures."""
    return float(f"{value:.4g}")
