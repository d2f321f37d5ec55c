"""The likeliest column of each row of a float32 product, with and without bfloat16 ruling columns out, in alternation.

    python benchmarks/cpu_likeliest.py [--rows 8 16 32 128] [--in-features 128 576] [--threads 1] [--repeats 31]

A weight with a bias is not screened (kernels/cpu_linear_screen.h), so the same weight with a bias of zeros is the other side.
49,152 columns of random numbers, or, with ``--near-equals``, of numbers by which all results of a row are nearly equal.
One line for each size: the shortest of the times, in ms, and their ratio, above 1 where screening is faster.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from octavo.kernels.cpu_build import load_library
from octavo.kernels.cpu_linear import PackedWeight
from octavo.kernels.cpu_products import ProductOps
from octavo.kernels.cpu_structs import declare

COLUMNS = 49152


def numbers(in_features: int, num_rows: int, is_near: bool) -> tuple[Tensor, Tensor]:
    """A weight ``[COLUMNS, in_features]`` and rows ``[num_rows, in_features]``."""
    weight, x = torch.randn(COLUMNS, in_features), torch.randn(num_rows, in_features)
    if not is_near:
        return weight, x
    base = torch.randn(1, in_features)
    return base * (1 + 1e-4 * weight), base + 0.1 * x


def shortest(ops: ProductOps, x: Tensor, weights: list[PackedWeight], repeats: int) -> list[float]:
    """ms, for each of the weights."""
    times = [float("inf")] * len(weights)
    for _ in range(repeats):
        for index, weight in enumerate(weights):
            begin = time.perf_counter()
            ops.likeliest(x, weight)
            times[index] = min(times[index], (time.perf_counter() - begin) * 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 128])
    parser.add_argument("--in-features", nargs="+", type=int, default=[128, 576])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--near-equals", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = load_library()
    if result.library is None:
        parser.exit(1, f"{result.detail}\n")
    ops = ProductOps(declare(result.library))
    for in_features in options.in_features:
        for num_rows in options.rows:
            weight, x = numbers(in_features, num_rows, options.near_equals)
            both = [ops.pack_linear(weight), ops.pack_linear(weight, torch.zeros(COLUMNS))]
            screened, whole = shortest(ops, x, both, options.repeats)
            ratio = whole / screened
            print(
                f"{num_rows:4} x {in_features:4} {screened:8.2f} {whole:8.2f} {ratio:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
