"""Native products beside torch's packed ones (oneDNN), in alternation: time, GFLOP/s and GB/s of weights.

    python benchmarks/cpu_linear.py [--kinds float32 bfloat16 q4_1] [--rows 1 8 32 128 1024] [--threads 2]
        [--repeats 7] [--shape 4096x4096x8] [--json PATH]

Shapes are SmolLM2-135M's, or the one given: out_features, in_features, layers. A measurement passes through as many different weights as the model has layers, so
that they come from memory as in a step; packing activations counts. Medians; `ratio` is torch's time over the
native one, above 1 where native is faster. GGUF's kinds have no counterpart in torch. `--cpu-time` counts this
thread's processor time instead: one thread only, and neighbours on the machine disturb it less.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels import torch_linear
from octavo.kernels.cpu_build import load_library
from octavo.kernels.cpu_linear import (
    BLOCK_BYTES,
    PackedWeight,
    RowKind,
    WeightKind,
    pack_gguf_weight,
    pack_weight,
)
from octavo.kernels.cpu_structs import Args, LinearArgs, PackRowsArgs, declare, program

SHAPES = [  # name, out_features, in_features, layers
    ("qkv", 960, 576, 30),
    ("o", 576, 576, 30),
    ("gate_up", 3072, 576, 30),
    ("down", 576, 1536, 30),
    ("head", 49152, 576, 1),
]
NUM_FLOATS = {WeightKind.Q4_F32: 2, WeightKind.Q8_F32: 3}  # that a block begins with
DTYPES = {WeightKind.FLOAT32: torch.float32, WeightKind.BFLOAT16: torch.bfloat16}
MOST_HEAD_ROWS = 128


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    shape: str
    kind: str
    rows: int
    microseconds: float  # of one product
    gflops: float
    gigabytes: float  # of packed weights, a second
    ratio: float | None  # torch's time over it
    best_ratio: float | None  # of the shortest times


class Native:
    """A program that multiplies the same rows with each weight, one after the other."""

    def __init__(self, library: ctypes.CDLL, x: Tensor, weights: list[PackedWeight]) -> None:
        self.library, self.keep = library, (x, weights)
        num_rows, first = x.shape[0], weights[0]
        self.count = ctypes.c_int64(num_rows)
        self.out = torch.empty(num_rows, first.out_features)
        rows, self.steps = x, list[Args]()
        if first.row_kind != RowKind.FLOAT32:
            size = library.octavo_packed_rows_size(first.row_kind, num_rows, first.in_features)
            rows = torch.empty(size, dtype=torch.uint8)
        self.rows = rows
        for weight in weights:
            if weight.row_kind != RowKind.FLOAT32:
                self.steps.append(self._pack_rows(x, weight))
            self.steps.append(self._linear(weight))
        self.program = program(self.steps)

    def _pack_rows(self, x: Tensor, weight: PackedWeight) -> Args:
        return PackRowsArgs(
            num_tokens=ctypes.addressof(self.count),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            size=weight.in_features,
            kind=weight.row_kind,
            capacity=x.shape[0],
            out=self.rows.data_ptr(),
        )

    def _linear(self, weight: PackedWeight) -> Args:
        return LinearArgs(
            num_tokens=ctypes.addressof(self.count),
            x=self.rows.data_ptr(),
            x_stride=weight.in_features,
            row_kind=weight.row_kind,
            capacity=self.out.shape[0],
            weight=weight.data.data_ptr(),
            kind=weight.kind,
            in_features=weight.in_features,
            out_features=weight.out_features,
            out=self.out.data_ptr(),
            out_stride=self.out.stride(0),
        )

    def __call__(self) -> None:
        address = ctypes.addressof(self.program)
        self.library.octavo_run(address, len(self.program), torch.get_num_threads())


def make_weights(
    library: ctypes.CDLL, kind: WeightKind, out_features: int, in_features: int, layers: int
) -> tuple[list[PackedWeight], list[torch_linear.PackedLinear]]:
    native, packed_by_torch = [], []
    for _ in range(layers):
        if kind in DTYPES:
            weight = torch.randn(out_features, in_features).to(DTYPES[kind])
            native.append(pack_weight(library, weight))
            packed_by_torch.append(torch_linear.pack_linear(weight, None))
        else:
            shape = (out_features, in_features // 32 * BLOCK_BYTES[kind])
            blocks = torch.randint(0, 100, shape, dtype=torch.uint8)
            if (num_floats := NUM_FLOATS.get(kind)) is not None:
                each = blocks.view(-1, BLOCK_BYTES[kind])  # bytes at random may be denormals
                each[:, : 4 * num_floats] = torch.rand(len(each), num_floats).view(torch.uint8)
            native.append(pack_gguf_weight(library, blocks, kind))
    return native, packed_by_torch


def alternate(
    works: list[Callable[[], None]], repeats: int, clock: Callable[[], float]
) -> list[list[float]]:
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, mine in zip(works, times, strict=True):
            start = clock()
            work()
            mine.append(clock() - start)
    return times


def measure(
    library: ctypes.CDLL,
    kind: WeightKind,
    options: argparse.Namespace,
    report: Callable[[Row], None],
) -> None:
    clock = time.process_time if options.cpu_time else time.perf_counter
    for name, out_features, in_features, layers in options.shape or SHAPES:
        weights, by_torch = make_weights(library, kind, out_features, in_features, layers)
        for num_rows in options.rows:
            if name == "head" and num_rows > MOST_HEAD_ROWS:
                continue
            x = torch.randn(num_rows, in_features)
            works: list[Callable[[], None]] = [Native(library, x, weights)]
            if by_torch:
                x_of_torch = x.to(DTYPES[kind])

                def with_torch(x: Tensor = x_of_torch) -> None:
                    for weight in by_torch:  # noqa: B023
                        torch_linear.linear(x, weight)

                works.append(with_torch)
            own, *other = alternate(works, options.repeats, clock)
            seconds = statistics.median(own) / layers
            report(
                Row(
                    name,
                    kind.name.lower(),
                    num_rows,
                    seconds * 1e6,
                    2 * num_rows * out_features * in_features / seconds / 1e9,
                    weights[0].data.numel() / seconds / 1e9,
                    statistics.median(other[0]) / statistics.median(own) if other else None,
                    min(other[0]) / min(own) if other else None,
                )
            )


def _shape(text: str) -> tuple[str, int, int, int]:
    out_features, in_features, layers = map(int, text.split("x"))
    return ("given", out_features, in_features, layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [kind.name.lower() for kind in WeightKind]
    parser.add_argument("--kinds", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 1024])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shape", type=_shape, action="append")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, on one thread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    result = load_library()
    if result.library is None:
        parser.exit(1, f"{result.detail}\n")
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        ratios = "" if row.ratio is None else f"{row.ratio:8.2f} {row.best_ratio:8.2f}"
        print(
            f"{row.shape:8} {row.kind:9} {row.rows:5} {row.microseconds:10.0f} {row.gflops:8.0f}"
            f" {row.gigabytes:7.1f} {ratios}",
            flush=True,
        )

    print("shape    kind       rows         us   GFLOP/s    GB/s    ratio     best")
    for name in options.kinds:
        measure(declare(result.library), WeightKind[name.upper()], options, report)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
