"""Block operations a second: pool, forks, copy-on-write, prefix matches, registration and eviction.

    python benchmarks/block_pool.py [--repeats 7] [--json PATH]

One operation is one block taken, given back, shared, matched, registered or evicted. Each line is the median
over the repeats, the worst and the best beside it, in CPU time of this process. No tensors: this is bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.engine.memory.block_hash import HashChain, root_hash
from octavo.engine.memory.block_pool import BlockPool
from octavo.engine.memory.kv_cache_manager import KVCacheManager

NUM_BLOCKS = 8192
BLOCK_SIZE = 16
TABLE = 64  # blocks of a sequence, where not said otherwise
TARGET = 1_000_000

Work = Callable[[], int]
"""Does something once; returns how many block operations it was."""


@dataclass(frozen=True)
class Case:
    """One line of the report. ``prepare`` is not timed."""

    name: str
    prepare: Callable[[], Work]
    rounds: int
    is_pool: bool = False  # the target counts


def pool_tables(num_blocks: int) -> Callable[[], Work]:
    def prepare() -> Work:
        pool = BlockPool(NUM_BLOCKS)

        def work() -> int:
            taken = pool.allocate(num_blocks)
            assert taken is not None
            pool.release(taken)
            return 2 * num_blocks

        return work

    return prepare


def pool_mixed() -> Work:
    """As decoding does it: 64 sequences take a block each, the one that came first gives all back."""
    pool = BlockPool(NUM_BLOCKS)
    tables: list[list[int]] = [[] for _ in range(64)]
    turn = iter(_endless(64))

    def work() -> int:
        for table in tables:
            taken = pool.allocate(1)
            assert taken is not None
            table += taken
        done = next(turn)
        num_released = len(tables[done])
        pool.release(tables[done])
        tables[done] = []
        return 64 + num_released

    return work


def _endless(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def pool_share() -> Work:
    pool = BlockPool(NUM_BLOCKS)
    table = pool.allocate(TABLE)
    assert table is not None

    def work() -> int:
        pool.share(table)
        pool.release(table)
        return 2 * TABLE

    return work


def pool_reuse_cached() -> Work:
    """Blocks that are free and cached are hit and given back."""
    pool = BlockPool(NUM_BLOCKS)
    table = pool.allocate(TABLE)
    assert table is not None
    for block_id in table:
        pool.set_cached(block_id, True)
    pool.release(table)

    def work() -> int:
        for block_id in table:
            pool.reuse(block_id)
        pool.release(table)
        return 2 * TABLE

    return work


def pool_fill() -> Work:
    """A token a block: the slots of a table fill up one by one."""
    pool = BlockPool(NUM_BLOCKS)

    def work() -> int:
        taken = pool.allocate(TABLE)
        assert taken is not None
        for num_filled in range(1, BLOCK_SIZE + 1):
            for block_id in taken:
                pool.fill(block_id, num_filled)
        pool.release(taken)
        return TABLE * (BLOCK_SIZE + 2)

    return work


def fork_and_close() -> Work:
    memory = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    parent = memory.open(0)
    memory.grow(parent, TABLE * BLOCK_SIZE - 3)
    memory.mark_computed(parent, TABLE * BLOCK_SIZE - 3)

    def work() -> int:
        memory.fork(parent, 1, TABLE * BLOCK_SIZE - 3)
        memory.close(1)
        return 2 * TABLE

    return work


def copy_on_write() -> Work:
    """A child of one half-full block writes: it gets a copy, then ends."""
    memory = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    parent = memory.open(0)
    memory.grow(parent, 3)
    memory.mark_computed(parent, 3)

    def work() -> int:
        child = memory.fork(parent, 1, 3)
        copies = memory.make_writable(child, 3)
        assert copies
        memory.commit()
        memory.close(1)
        return 3

    return work


def _filled(memory: KVCacheManager, seq_id: int, token_ids: list[int]) -> None:
    """A sequence comes, is computed, and goes; its blocks stay findable."""
    blocks = memory.open(seq_id, HashChain(root_hash(None)))
    memory.grow(blocks, len(token_ids))
    memory.publish(blocks, token_ids, 0, len(token_ids))
    memory.mark_computed(blocks, len(token_ids))
    memory.commit()
    memory.close(seq_id, token_ids)


def match_hit(*, is_hashed: bool) -> Callable[[], Work]:
    def prepare() -> Work:
        memory = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
        token_ids = list(range(TABLE * BLOCK_SIZE))
        _filled(memory, 0, token_ids)
        known = HashChain(root_hash(None))
        memory.match(known, token_ids, len(token_ids))

        def work() -> int:
            chain = known if is_hashed else HashChain(known.root)
            match = memory.match(chain, token_ids, len(token_ids))
            assert len(match.device_block_ids[0]) == TABLE
            return TABLE

        return work

    return prepare


def match_miss() -> Work:
    """Nothing is found: one block is hashed and looked up."""
    memory = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    _filled(memory, 0, list(range(TABLE * BLOCK_SIZE)))
    other = list(range(7, 7 + TABLE * BLOCK_SIZE))
    root = root_hash(None)

    def work() -> int:
        memory.match(HashChain(root), other, len(other))
        return 1

    return work


def hit_and_close() -> Work:
    """A whole prompt is matched, attached and given back."""
    memory = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    token_ids = list(range(TABLE * BLOCK_SIZE))
    _filled(memory, 0, token_ids)
    known = HashChain(root_hash(None))

    def work() -> int:
        match = memory.match(known, token_ids, len(token_ids))
        blocks = memory.open(1, known)
        memory.attach(blocks, match, token_ids)
        memory.commit()
        memory.close(1, token_ids)
        return 3 * TABLE

    return work


def register_and_evict(*, enable_prefix_caching: bool) -> Callable[[], Work]:
    """Sequences of ever new tokens over a full pool: each block is evicted, taken, registered, given back."""

    def prepare() -> Work:
        memory = KVCacheManager(4 * TABLE, BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)
        numbers = iter(range(10**9))

        def work() -> int:
            number = next(numbers)
            token_ids = list(range(number, number + TABLE * BLOCK_SIZE))
            _filled(memory, number, token_ids)
            return (4 if enable_prefix_caching else 2) * TABLE

        for _ in range(8):
            work()
        return work

    return prepare


CASES = (
    Case(f"pool: allocate + release, {TABLE} blocks", pool_tables(TABLE), 2000, is_pool=True),
    Case("pool: allocate + release, 1 block", pool_tables(1), 50_000, is_pool=True),
    Case("pool: 64 sequences grow by one, one ends", lambda: pool_mixed(), 1500, is_pool=True),
    Case(f"pool: share + release, {TABLE} blocks", lambda: pool_share(), 2000, is_pool=True),
    Case(f"pool: reuse cached + release, {TABLE} blocks", pool_reuse_cached, 1500, is_pool=True),
    Case("pool: fill slot by slot", pool_fill, 150, is_pool=True),
    Case(f"manager: fork + close, {TABLE} blocks", fork_and_close, 1500),
    Case("manager: fork, copy-on-write, close, 1 block", copy_on_write, 15_000),
    Case(f"cache: match, hit, {TABLE} blocks hashed before", match_hit(is_hashed=True), 1500),
    Case(f"cache: match, hit, {TABLE} blocks to hash", match_hit(is_hashed=False), 800),
    Case("cache: match, miss", match_miss, 20_000),
    Case(f"cache: match, attach, close, {TABLE} blocks", hit_and_close, 800),
    Case(
        "cache: evict, allocate, register, close",
        register_and_evict(enable_prefix_caching=True),
        300,
    ),
    Case(
        "the same without a prefix cache (allocate, close)",
        register_and_evict(enable_prefix_caching=False),
        600,
    ),
)


def rate(case: Case) -> float:
    """Block operations a second, once."""
    work = case.prepare()
    num_operations = 0
    begin = time.process_time()
    for _ in range(case.rounds):
        num_operations += work()
    return num_operations / (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    lines = []
    for case in CASES:
        rates = [rate(case) for _ in range(args.repeats)]
        median = statistics.median(rates)
        lines.append(
            {
                "case": case.name,
                "operations_per_s": round(median),
                "best": round(max(rates)),
                "worst": round(min(rates)),
            }
        )
        below = " below the target" if case.is_pool and median < TARGET else ""
        print(
            f"{case.name:<50} {median / 1e6:8.2f} M/s  ({min(rates) / 1e6:.2f}-{max(rates) / 1e6:.2f})"
            f"  {1e9 / median:6.0f} ns{below}"
        )
    if args.json:
        command = f"python benchmarks/block_pool.py --repeats {args.repeats} --json FILE"
        args.json.write_text(json.dumps({"command": command, "cases": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
