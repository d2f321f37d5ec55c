"""Checks and measures octavo on a GPU in under eight minutes; started by ``gpu_check.sh``.

    benchmarks/gpu_check.sh [--dry-run] [--sections card,twins,...] [--json PATH]

Each section runs in a process and within a time of its own, so that one that fails, hangs or brings the GPU down
is reported and costs the others nothing. ``--dry-run`` does all of it on the CPU, with Triton's interpreter and
tiny shapes: it shows that the script works, and no figure of it means anything. Ends with one JSON line and then
one table; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

LIMITS_S = {
    "card": 40,
    "twins": 140,
    "answers": 140,
    "offline": 110,
    "steps": 80,
    "attention": 50,
    "kernels": 45,
}
"""Seconds that a section may take, in the order in which they run."""
TOGETHER = {"twins", "answers"}
"""Time nothing and spend most of their own compiling: they run at the same time."""
TOTAL_S = 465

Report = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, interpreted, tiny")
    parser.add_argument("--sections", default=",".join(LIMITS_S), help="which, with commas")
    parser.add_argument("--json", type=Path, help="write the JSON here too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return _run_section(args.child, args.report, args.dry_run)
    names = args.sections.split(",")
    unknown = [name for name in names if name not in LIMITS_S]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(LIMITS_S)}")
    return _run_all(names, args.dry_run, args.json)


def _run_all(names: list[str], is_dry: bool, json_path: Path | None) -> int:
    end_by = time.monotonic() + TOTAL_S
    sections: dict[str, Report] = {}

    def run(name: str) -> None:
        limit_s = min(LIMITS_S[name], end_by - time.monotonic())
        report = _in_child(name, limit_s, is_dry, sections.get("card"))
        sections[name] = report
        done = f"{name}: {report['status']} in {report['seconds']:.0f} s"
        print(done, file=sys.stderr, flush=True)

    with ThreadPoolExecutor() as pool:
        for _, group in groupby(names, key=lambda name: "" if name in TOGETHER else name):
            list(pool.map(run, list(group)))
    sections = {name: sections[name] for name in names}
    whole = {"dry_run": is_dry, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "sections": sections}
    if json_path is not None:
        json_path.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole))
    print(_table(sections))
    return 0 if all(_is_good(section) for section in sections.values()) else 1


def _in_child(name: str, limit_s: float, is_dry: bool, card: Report | None) -> Report:
    """Run a section; whatever becomes of it is a report."""
    if limit_s < 5:
        return {"status": "left out", "seconds": 0.0, "rows": [], "error": "no time was left"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        path.write_text(json.dumps({"card": card}))
        command = [sys.executable, str(Path(__file__)), "--child", name, "--report", str(path)]
        command += ["--dry-run"] if is_dry else []
        status, error = "ok", ""
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            if run.returncode != 0:
                status, error = "failed", run.stderr[-2000:]
        except subprocess.TimeoutExpired as expired:
            said = expired.stderr or b""
            text = said.decode(errors="replace") if isinstance(said, bytes) else said
            status, error = "timeout", f"more than {limit_s:.0f} s; {text[-1000:]}"
        rows = json.loads(path.read_text()).get("rows", [])
    return {"status": status, "seconds": time.monotonic() - begin, "rows": rows, "error": error}


def _run_section(name: str, report: Path, is_dry: bool) -> int:
    import torch
    from gpu.common import Machine
    from roofline import Card

    if not is_dry and not torch.cuda.is_available():
        print("PyTorch sees no GPU; --dry-run works without one", file=sys.stderr)
        return 1
    given = json.loads(report.read_text())["card"]
    values = {row["name"]: row.get("value") for row in given["rows"]} if given else {}
    copies, products = values.get("copy bandwidth"), values.get("bfloat16 products")
    card = Card(copies * 1e9, products * 1e12) if copies and products else None
    device = torch.device("cpu" if is_dry else "cuda")
    rows = []
    for row in importlib.import_module(f"gpu.{name}").run(Machine(device, is_dry, card)):
        rows.append(row)
        report.write_text(json.dumps({"rows": rows}))  # what is known if the next one hangs
    return 0


def _is_good(section: Report) -> bool:
    return section["status"] == "ok" and all(row.get("ok", True) for row in section["rows"])


def _table(sections: dict[str, Report]) -> str:
    lines = ["", f"{'section':10} {'what':62} {'value':>22} {'of floor':>9}  note"]
    for name, section in sections.items():
        if section["status"] != "ok":
            reason = section["error"].strip().splitlines()
            lines.append(
                f"{name:10} {section['status'].upper():62} {'':>22} {'':>9}  {reason[-1] if reason else ''}"
            )
        lines += [f"{name:10} {_line(row)}" for row in section["rows"]]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    value = f"{row['value']:,.3f} {row['unit']}" if "value" in row else ""
    if "ok" in row and not value:
        value = "right" if row["ok"] else "WRONG"
    elif not row.get("ok", True):
        value += " WRONG"
    share = f"{row['share']:.0%}" if "share" in row else ""
    return f"{row['name']:62} {value:>22} {share:>9}  {row.get('note', '')}"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
