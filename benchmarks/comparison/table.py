"""The result file as Markdown, between two marks of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import results

BEGIN = "<!-- Written by benchmarks/compare.py --table: begin -->"
END = "<!-- Written by benchmarks/compare.py --table: end -->"


def write(page: Path, result_file: Path) -> None:
    """Replace what is between the marks of ``page``.

    Raises:
        ValueError: the page does not have both marks, in this order.
    """
    page.write_text(replace_between(page.read_text(), render(results.load(result_file))))


def replace_between(text: str, body: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{body}\n{END}{after}"


def render(content: dict[str, Any]) -> str:
    rows = results.latest(content, "rows", ("pair", "work", "figure"))
    alone = results.latest(content, "alone", ("form", "work", "figure"))
    parts = [_machines(content["runs"])]
    for heading in dict.fromkeys(map(_heading, rows)):
        group = [row for row in rows if _heading(row) == heading]
        parts.append(f"### {heading}\n\n{_pair_table(group)}")
    if alone:
        parts.append(f"### octavo alone\n\n{_alone_table(alone)}")
    return "\n".join(parts)


def _heading(row: dict[str, Any]) -> str:
    return (
        f"octavo {row['precision']} beside {row['peer_name']} {row['peer_version']} "
        f"{row['peer_precision']}, {_TRANSPORTS[row['transport']]}"
    )


_TRANSPORTS = {"http": "over HTTP", "in-process": "in-process"}


def _machines(runs: Sequence[dict[str, Any]]) -> str:
    texts = dict.fromkeys(_machine(run["machine"]) for run in runs)
    return "".join(f"- {text}\n" for text in texts)


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} cores of {machine['cpu']} ({', '.join(machine['flags'])}), "
        f"{machine['memory_gb']} GB; octavo {machine['octavo']}, PyTorch {machine['torch']}, "
        f"Python {machine['python']}"
    )


def _pair_table(rows: Sequence[dict[str, Any]]) -> str:
    head = "| work | figure | octavo | peer | times better | in the rounds | repeats |\n"
    return head + "|---|---|---|---|---|---|---|\n" + "".join(map(_pair_line, rows)) + _others(rows)


def _others(rows: Sequence[dict[str, Any]]) -> str:
    shares = [row["others_cpu"] for row in rows if "others_cpu" in row]
    if not shares:
        return ""
    return f"\nOther processes took at most {max(shares):.0%} of the CPU time of one measurement.\n"


def _pair_line(row: dict[str, Any]) -> str:
    cells = (
        row["work"],
        f"{row['figure']}, {row['unit']}",
        _with_range(row["octavo"], row["octavo_range"]),
        _with_range(row["peer"], row["peer_range"]),
        f"**{row['ratio']:.2f}**",
        "{:.2f} to {:.2f}".format(*row["ratio_range"]),
        str(row["repeats"]),
    )
    return f"| {' | '.join(cells)} |\n"


def _alone_table(rows: Sequence[dict[str, Any]]) -> str:
    head = "| form | work | figure | median (range) | repeats |\n|---|---|---|---|---|\n"
    lines = "".join(
        f"| {row['form']} | {row['work']} | {row['figure']}, {row['unit']} "
        f"| {_with_range(row['median'], row['range'])} | {row['repeats']} |\n"
        for row in rows
    )
    return head + lines + _others(rows)


def _with_range(value: float, spread: Sequence[float]) -> str:
    return f"{value:g} ({spread[0]:g} to {spread[1]:g})"
