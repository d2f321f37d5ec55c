"""The PagedAttention paper's tables about memory (Kwon et al., SOSP 2023, arXiv 2309.06180), by octavo's scheduler and memory.

    python benchmarks/memory_paper.py [--quick] [--json PATH]

Requests with the paper's length distributions go through the real scheduler, block pool and prefix cache; the
executor computes nothing. The pool is that of the paper's table 1: OPT-13B on an A100 with 40 GB, 12 GiB for
keys and values of 800 KiB a token. docs/memory-paper.md says how everything is modelled and what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from paper import beam_record
from paper.lengths import ALPACA, MAX_MODEL_LEN, SHAREGPT, TRANSLATION, LengthModel, means
from paper.replay import replay
from paper.reservations import longest, oracle, pow2, simulate

NUM_SLOTS = 12 * 2**30 // (800 * 2**10)
WIDTHS = (2, 4, 6)
WARM_SHARE = 0.2
SEED = 1
SHARING_REQUESTS = 8
"""Requests at the same time where sharing is measured; the pool is large enough for all of them."""
PREFIXES = {"1-shot": 80, "5-shot": 341}
RESERVATIONS = {"Orca (Max)": longest, "Orca (Pow2)": pow2, "Orca (Oracle)": oracle}

PAPER_SHARES = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "paged": 96.3}
PAPER_BATCHES = {
    "ShareGPT": {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "paged": 30.42},
    "Alpaca": {"Orca (Max)": 7.00, "Orca (Pow2)": 43.24, "Orca (Oracle)": 72.75, "paged": 132.44},
}
PAPER_SAVINGS = {
    ("ShareGPT", "samples"): (16.2, 30.5),
    ("ShareGPT", "beams"): (44.3, 66.3),
    ("Alpaca", "samples"): (6.1, 9.8),
    ("Alpaca", "beams"): (37.6, 55.2),
}


@dataclass(frozen=True)
class Sizes:
    """Requests in each stream."""

    sharegpt: int
    alpaca: int
    sharegpt_shared: int
    alpaca_shared: int
    admission: int
    translation: int


QUICK = Sizes(300, 1200, 24, 120, 150, 700)
FULL = Sizes(4000, 20000, 400, 1600, 1000, 6000)


def percent(share: float) -> float:
    return round(100 * share, 1)


# --- measure -------------------------------------------------------------------------------------


def reservations(model: LengthModel, count: int, num_slots: int) -> list[dict[str, Any]]:
    """Contiguous reservation, by the same stream and the same pool."""
    stream = model.draw(count, SEED)
    rows = []
    for name, reserve in RESERVATIONS.items():
        use = simulate(stream, num_slots, reserve, WARM_SHARE)
        rows.append(
            {
                "data": model.name,
                "system": name,
                "tokens": percent(use.token_share),
                "for later": percent(use.later_share),
                "never used": percent(use.never_share),
                "outside": percent(use.outside_share),
                "batch": round(use.num_running, 2),
            }
        )
    return rows


def paged(
    model: LengthModel, count: int, num_slots: int, block_size: int = 16, **options: Any
) -> dict[str, Any]:
    """octavo, by the same stream and the same pool."""
    stream = model.draw(count, SEED)
    result = replay(stream, num_slots, block_size=block_size, warm_share=WARM_SHARE, **options)
    least = sum(one.num_prompt_tokens + one.num_output_tokens - 1 for one in stream)
    expected = result.held_tokens / (result.held_tokens + (block_size - 1) / 2)
    return {
        "data": model.name,
        "system": f"octavo, block {block_size}",
        "tokens": percent(result.token_share),
        "of the pool": percent(result.pool_share),
        "held": round(result.held_tokens, 1),
        "expected": percent(expected),
        "batch": round(result.num_running, 2),
        "preemptions a request": round(result.num_preemptions / count, 2),
        "computed again": percent(1 - least / result.num_computed_tokens),
        "steps": result.whole.num_steps,
    }


def admission(count: int, num_slots: int) -> list[dict[str, Any]]:
    """What a larger watermark, or the prefix cache, changes under a queue that is never empty."""
    variants: dict[str, dict[str, Any]] = {
        "watermark 0.01": {},
        "the same, prefix cache": {"enable_prefix_caching": True},
        "watermark 0.05 (the default)": {"watermark": 0.05},
        "watermark 0.1": {"watermark": 0.1},
    }
    rows = []
    for name, options in variants.items():
        row = paged(SHAREGPT, count, num_slots, **options)
        rows.append(
            {
                "ShareGPT": name,
                "of the pool, %": row["of the pool"],
                "batch": row["batch"],
                "preemptions a request": row["preemptions a request"],
                "computed again, %": row["computed again"],
                "steps in all": row["steps"],
            }
        )
    return rows


def sharing(model: LengthModel, count: int, width: int, *, is_beam_search: bool) -> dict[str, Any]:
    """Blocks saved by forks alone: the prefix cache is off, nobody is preempted."""
    stream = model.draw(count, SEED)
    searches = beam_record.load()[width] if is_beam_search else ()
    result = replay(
        stream,
        SHARING_REQUESTS * width * (MAX_MODEL_LEN + 32),
        n=width,
        searches=searches,
        max_num_seqs=SHARING_REQUESTS * width,
    )
    if result.num_preemptions:
        raise RuntimeError("the pool was meant to hold everything")
    kind = "beams" if is_beam_search else "samples"
    low, high = PAPER_SAVINGS[model.name, kind]
    return {
        "data": model.name,
        "kind": kind,
        "width": width,
        "saved": percent(result.saved_share),
        "paper, 2 to 6": f"{low}-{high}",
        "copies a sequence": round(result.num_copies / result.num_finished, 2),
    }


def shared_prefix(name: str, num_prefix: int, count: int, num_slots: int) -> list[dict[str, Any]]:
    """Translation with the same examples before each sentence."""
    stream = TRANSLATION.draw(count, SEED)
    whole = [one._replace(num_prompt_tokens=one.num_prompt_tokens + num_prefix) for one in stream]
    reserved = simulate(whole, num_slots, oracle, WARM_SHARE)
    rows = [_prefix_row(name, "Orca (Oracle)", reserved.num_running, 1.0, None, None)]
    num_decoded = sum(one.num_output_tokens - 1 for one in stream)
    for is_cached in (False, True):
        result = replay(
            stream, num_slots, shared_prefix=num_prefix, enable_prefix_caching=is_cached
        )
        prompt_tokens = (result.num_computed_tokens - num_decoded) / count
        system = f"octavo, prefix cache {'on' if is_cached else 'off'}"
        ratio = result.num_running / reserved.num_running
        rows.append(
            _prefix_row(name, system, result.num_running, ratio, prompt_tokens, result.saved_share)
        )
    return rows


def _prefix_row(
    name: str,
    system: str,
    batch: float,
    ratio: float,
    prompt_tokens: float | None,
    saved: float | None,
) -> dict[str, Any]:
    return {
        "prefix": name,
        "system": system,
        "batch": round(batch, 1),
        "of Oracle's": round(ratio, 2),
        "prompt tokens computed a request": round(prompt_tokens, 1) if prompt_tokens else "",
        "blocks saved": "" if saved is None else percent(saved),
    }


def measure(sizes: Sizes, num_slots: int = NUM_SLOTS) -> dict[str, Any]:
    """All tables."""
    both = ((SHAREGPT, sizes.sharegpt), (ALPACA, sizes.alpaca))
    contiguous = [row for model, count in both for row in reservations(model, count, num_slots)]
    blocks = [paged(model, count, num_slots) for model, count in both]
    small = [paged(ALPACA, sizes.alpaca, num_slots, size) for size in (8, 4)]
    shared = ((SHAREGPT, sizes.sharegpt_shared), (ALPACA, sizes.alpaca_shared))
    savings = [
        sharing(model, count, width, is_beam_search=is_beam_search)
        for is_beam_search in (False, True)
        for model, count in shared
        for width in WIDTHS
    ]
    prefixes = [
        row
        for name, num_prefix in PREFIXES.items()
        for row in shared_prefix(name, num_prefix, sizes.translation, num_slots)
    ]
    return {
        "lengths": [_length_row(model, count) for model, count in both],
        "reservations": contiguous,
        "paged": blocks + small,
        "admission": admission(sizes.admission, num_slots),
        "sharing": savings,
        "prefix": prefixes,
    }


def _length_row(model: LengthModel, count: int) -> dict[str, Any]:
    stream = model.draw(count, SEED)
    mean_prompt, mean_output = means(stream)
    return {
        "data": model.name,
        "requests": count,
        "mean in": round(mean_prompt, 1),
        "mean out": round(mean_output, 1),
        "sigma in": model.sigma_prompt,
        "sigma out": model.sigma_output,
        "longest": max(one.num_prompt_tokens + one.num_output_tokens for one in stream),
    }


# --- print ---------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of rows that have the same columns."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    lines[1] = ["-" * width for width in widths]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def token_shares(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Figure 2: what holds a token. The paper's profile is of OPT-13B, ShareGPT."""
    rows = []
    for row in found["reservations"]:
        in_paper = PAPER_SHARES[row["system"]] if row["data"] == "ShareGPT" else ""
        rows.append(
            {
                "data": row["data"],
                "system": row["system"],
                "paper, %": in_paper,
                "here, %": row["tokens"],
                "for later": row["for later"],
                "never used": row["never used"],
                "outside": row["outside"],
            }
        )
    for row in found["paged"]:
        is_figure = row["data"] == "ShareGPT"
        rows.append(
            {
                "data": row["data"],
                "system": row["system"],
                "paper, %": PAPER_SHARES["paged"] if is_figure else "",
                "here, %": row["tokens"],
                "for later": "",
                "never used": round(100 - row["tokens"], 1),
                "outside": "",
            }
        )
    return rows


def batches(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Figure 13: requests in a batch."""
    rows = []
    for row in [*found["reservations"], *found["paged"]]:
        is_paged = "octavo" in row["system"]
        name = "paged" if is_paged else row["system"]
        is_figure = not is_paged or row["system"].endswith("16")
        oracles = next(
            other["batch"]
            for other in found["reservations"]
            if other["data"] == row["data"] and other["system"] == "Orca (Oracle)"
        )
        rows.append(
            {
                "data": row["data"],
                "system": row["system"],
                "paper": PAPER_BATCHES[row["data"]][name] if is_figure else "",
                "here": row["batch"],
                "of Oracle's": round(row["batch"] / oracles, 2),
                "preemptions a request": row.get("preemptions a request", ""),
                "computed again, %": row.get("computed again", ""),
            }
        )
    return sorted(rows, key=lambda row: row["data"], reverse=True)


def block_sizes(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "data": row["data"],
            "system": row["system"],
            "tokens held a sequence": row["held"],
            "expected, %": row["expected"],
            "here, %": row["tokens"],
            "of the whole pool, %": row["of the pool"],
        }
        for row in found["paged"]
    ]


def report(found: dict[str, Any]) -> str:
    """The tables, each with what to know beside it."""
    return f"""\
Length models: log-normal, independent, cut at {MAX_MODEL_LEN} in all; pool of {NUM_SLOTS} slots.

{table(found["lengths"])}

1. KV memory that holds token states (paper: figure 2, vLLM 96.3%). Reservations: of the pool. octavo: of what
is allocated; "never used" is the end of each sequence's last block.

{table(token_shares(found))}

A sequence wastes on average half of its last block: the share is T / (T + (block - 1) / 2) for T tokens held.
With 16, 96.3% needs T = 195; Alpaca's sequences hold far fewer, so smaller blocks do it.

{table(block_sizes(found))}

2. Requests in a batch at equal memory (paper: figure 13, at 2 and 30 requests/s; here the queue is never empty,
so a batch is all that memory holds, and requests are preempted for it).

{table(batches(found))}

A shorter stream: admitting less eagerly costs few steps and saves most of the work done twice.

{table(found["admission"])}

3. Blocks saved by sharing, of those without it, in % (paper: figure 15; range over widths 2 to 6). Prefix cache off.

{table(found["sharing"])}

Parents of beams are those of SmolLM2-135M's own searches (benchmarks/data/beam_parents.json), not of OPT-13B's.

4. A shared prefix (paper: figure 16, 80 and 341 tokens; vLLM has 1.67 and 3.58 times the throughput of Orca
(Oracle)). Lengths of the sentences are ours: {TRANSLATION.mean_prompt} in, {TRANSLATION.mean_output} out.

{table(found["prefix"])}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short streams, under 30 s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the tables there")
    args = parser.parse_args()
    begin = time.perf_counter()
    found = measure(QUICK if args.quick else FULL)
    print(report(found))
    if args.json:
        command = f"python benchmarks/memory_paper.py{' --quick' if args.quick else ''} --json FILE"
        seconds = round(time.perf_counter() - begin, 1)
        args.json.write_text(
            json.dumps({"command": command, "seconds": seconds, **found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
