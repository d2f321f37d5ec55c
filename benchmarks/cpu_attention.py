"""Native attention against the torch op set, in alternation: milliseconds a layer, and the ratio.

    python benchmarks/cpu_attention.py [--repeats 15] [--threads 2] [--json PATH]

Heads of SmolLM2-135M: 9 query heads over 3 KV heads of 64. Each call takes another layer of a cache
that is larger than the processor's own (`--layers`), as a step of a model does; blocks are scattered.
Both sides attend over bf16 keys and values; the torch side's queries are bf16. Medians, with the
least and most beside them. With one thread it counts processor time, which is right on a busy machine
too; with more, only an idle machine gives numbers that mean something.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from octavo.kernels import cpu_build, cpu_structs
from octavo.kernels.ops import AttentionMetadata, LayerKVCache
from octavo.kernels.torch_ops import TorchOps

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
CALLS = 8  # of each side in a row, before the other side's turn


@dataclass(frozen=True)
class Case:
    """A batch: rows of (seq_len, query_len)."""

    name: str
    rows: tuple[tuple[int, int], ...]
    block_size: int = 16


CASES = (
    Case("decode, 1 row, context 200", ((200, 1),)),
    Case("decode, 8 rows, context 200", ((200, 1),) * 8),
    Case("decode, 32 rows, context 200", ((200, 1),) * 32),
    Case("decode, 32 rows, context 200, blocks of 64", ((200, 1),) * 32, 64),
    Case("decode, 32 rows, contexts 16 to 1000", tuple((16 + 984 * i // 31, 1) for i in range(32))),
    Case("decode, 1 row, context 4096", ((4096, 1),)),
    Case("decode, 8 rows, context 2048", ((2048, 1),) * 8),
    Case("prefill of 32", ((32, 32),)),
    Case("prefill of 1024", ((1024, 1024),)),
    Case("prefill of 4 times 128", ((128, 128),) * 4),
    Case("last 512 of 4096", ((4096, 512),)),
)


@dataclass(frozen=True)
class Line:
    """One case's medians, in milliseconds a layer."""

    case: str
    native_ms: float
    native_range: tuple[float, float]
    torch_ms: float
    torch_range: tuple[float, float]
    torch_over_native: float


class Batch:
    """What both sides attend over; every layer's blocks lie alike."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(0)
        counts = [-(-seq_len // case.block_size) for seq_len, _ in case.rows]
        self.num_blocks = sum(counts) + 8
        ids = torch.randperm(self.num_blocks, generator=random).tolist()
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        queries = [query_len for _, query_len in case.rows]
        lengths = [seq_len for seq_len, _ in case.rows]
        starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
        self.metadata = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor(
                [table + [table[0]] * (max(counts) - len(table)) for table in tables],
                dtype=torch.int32,
            ),
            slot_mapping=torch.full((starts[-1],), -1),
            query_lens_host=queries,
            seq_lens_host=lengths,
            max_query_len=max(queries),
            max_seq_len=max(lengths),
        )
        self.q = torch.randn(starts[-1], NUM_Q_HEADS, HEAD_DIM, generator=random).bfloat16()

    def layers(self, case: Case, count: int) -> list[LayerKVCache]:
        """Caches of random numbers. Both layouts have as many bytes: either side may read them."""
        shape = (self.num_blocks, case.block_size, NUM_KV_HEADS, HEAD_DIM)
        first = LayerKVCache(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16())
        others = [LayerKVCache(first.key.clone(), first.value.clone()) for _ in range(count - 1)]
        return [first, *others]


def native_call(
    batch: Batch, case: Case, layers: list[LayerKVCache], num_threads: int
) -> Callable[[int], None]:
    """A function that attends over one layer."""
    native = cpu_build.load_library()
    if native.library is None:
        raise SystemExit(f"no native library: {native.detail}")
    library = cpu_structs.declare(native.library)
    metadata, q = batch.metadata, batch.q.float()
    out = torch.empty_like(q)
    cells = torch.tensor([len(case.rows), metadata.block_tables.shape[1]])
    programs = []
    for cache in layers:
        args = cpu_structs.AttentionArgs(
            num_rows=cells.data_ptr(),
            query_start_loc=metadata.query_start_loc.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_tables=metadata.block_tables.data_ptr(),
            table_stride=cells[1:].data_ptr(),
            q=q.data_ptr(),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            key=cache.key.data_ptr(),
            value=cache.value.data_ptr(),
            dtype=1,
            block_size=case.block_size,
            num_q_heads=NUM_Q_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )
        programs.append((args, cpu_structs.program([args])))
    kept = (metadata, q, out, cells, layers)

    def call(i: int) -> None:
        _, program = programs[i % len(kept[-1])]
        library.octavo_run(program, 1, num_threads)

    return call


def torch_call(batch: Batch, layers: list[LayerKVCache]) -> Callable[[int], None]:
    """The same through the torch op set, which plans a batch once for all layers."""
    ops = TorchOps()

    def call(i: int) -> None:
        ops.attention(batch.q, layers[i % len(layers)], batch.metadata, scale=HEAD_DIM**-0.5)

    return call


def measure(case: Case, num_layers: int, repeats: int, num_threads: int) -> Line:
    """Time both sides by turns."""
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    batch = Batch(case)
    layers = batch.layers(case, num_layers)
    calls = [native_call(batch, case, layers, num_threads), torch_call(batch, layers)]
    times: list[list[float]] = [[], []]
    with torch.inference_mode():
        for call in calls:
            call(0)
        for repeat in range(repeats):
            for side, call in enumerate(calls):
                begin = clock()
                for i in range(CALLS):
                    call(repeat * CALLS + i)
                times[side].append((clock() - begin) / CALLS * 1e3)
    native, other = (statistics.median(side) for side in times)
    ranges = [(min(side), max(side)) for side in times]
    return Line(case.name, native, ranges[0], other, ranges[1], other / native)


def main() -> None:
    """Measure all cases, or those whose name holds ``--only``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = []
    for case in CASES:
        if options.only not in case.name:
            continue
        line = measure(case, options.layers, options.repeats, options.threads)
        lines.append(line)
        print(
            f"{line.case:44} native {line.native_ms:7.3f} ({line.native_range[0]:.3f} .. "
            f"{line.native_range[1]:.3f})  torch {line.torch_ms:7.3f} ({line.torch_range[0]:.3f} .. "
            f"{line.torch_range[1]:.3f})  ratio {line.torch_over_native:5.1f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")


if __name__ == "__main__":
    main()
