"""What the sections share: the machine, rows of results, timing, made-up batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from roofline import Card, Work
from torch import Tensor

from octavo.kernels.ops import AttentionMetadata, LayerKVCache
from octavo.kernels.select import select_ops
from octavo.kernels.triton_ops import TritonOps

FLUSH_BYTES = 256 << 20  # more than any card's L2


class Machine(NamedTuple):
    """Where the sections run. A dry one is the CPU under Triton's interpreter, with tiny shapes."""

    device: torch.device
    is_dry: bool
    card: Card | None  # as measured by the section "card"; None before

    def ops(self) -> TritonOps:
        ops = select_ops("triton", self.device)
        assert isinstance(ops, TritonOps)
        return ops


Row = dict[str, Any]
"""``name`` and what is known of: ``value`` with ``unit``, ``share`` of the floor's speed, ``ok``, ``note``."""


def attempt(name: str, measure: Callable[[], Row]) -> Row:
    """What ``measure`` adds to a row, or why it failed: one case's failure costs the others nothing."""
    try:
        return {"name": name, **measure()}
    except Exception as error:  # noqa: BLE001, whatever it is, it is reported
        return {"name": name, "ok": False, "note": f"{type(error).__name__}: {error}"[:300]}


def checked(name: str, tolerance: float, measure: Callable[[], float]) -> Row:
    """A row that is right or wrong by a difference."""

    def check() -> Row:
        apart = measure()
        return {
            "ok": apart <= tolerance,
            "note": f"difference {apart:.1e}, allowed {tolerance:.0e}",
        }

    return attempt(name, check)


def timed(name: str, call: Callable[[], object], work: Work, machine: Machine) -> Row:
    """A row of the device's time for ``call``, with the share of the floor on this card."""
    return attempt(name, lambda: time_of(seconds_of(call, machine), work, machine))


def time_of(seconds: float, work: Work, machine: Machine) -> Row:
    row: Row = {"value": seconds * 1e3, "unit": "ms"}
    if machine.card is not None:
        row["share"] = work.floor_s(machine.card) / seconds
        row["note"] = f"{work.bound(machine.card)}-bound"
    return row


def seconds_of(call: Callable[[], object], machine: Machine, budget_s: float = 0.15) -> float:
    """Median time of ``call`` on the device, with the cache emptied before each."""
    if machine.is_dry:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    for _ in range(3):
        call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=machine.device)
    times: list[float] = []
    end_by = time.monotonic() + budget_s
    while len(times) < 5 or (time.monotonic() < end_by and len(times) < 100):
        flush.zero_()  # long enough for the host to enqueue the call meanwhile
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def sync(machine: Machine) -> None:
    if not machine.is_dry:
        torch.cuda.synchronize(machine.device)


class Batch(NamedTuple):
    """Random queries over a cache of random keys and values, NaN where nothing is written."""

    q: Tensor  # [num_tokens, num_q_heads, head_dim]
    cache: LayerKVCache
    metadata: AttentionMetadata


def paged_batch(
    rows: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
) -> Batch:
    """
    Args:
        rows: (sequence length, query tokens).
        heads: query heads, KV heads, head dim.
    """
    num_q, num_kv, head_dim = heads
    counts = [-(-seq_len // block_size) for seq_len, _ in rows]
    width, num_blocks = max(counts), sum(counts) + 1
    ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row] = ids[first]
        tables[row, :count] = ids[first : first + count]
        first += count
    shape = (num_blocks, block_size, num_kv, head_dim)
    key, value = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    for row, (seq_len, _) in enumerate(rows):
        last, used = int(tables[row, (seq_len - 1) // block_size]), seq_len % block_size
        if used:
            key[last, used:] = float("nan")
            value[last, used:] = float("nan")
    query_lens, seq_lens = [count for _, count in rows], [seq_len for seq_len, _ in rows]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        slot_mapping=torch.full((sum(query_lens),), -1).to(device),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decode_rows=sum(count == 1 for count in query_lens),
    )
    q = torch.randn((sum(query_lens), num_q, head_dim), dtype=dtype, device=device)
    cache = LayerKVCache(*(tensor.to(cache_dtype or dtype) for tensor in (key, value)))
    return Batch(q, cache, metadata)
