"""Tests of the Triton kernels on a CPU, under Triton's interpreter, in a process of their own.

``@triton.jit`` decides when a module is imported whether its kernels are interpreted. So these files are
collected only where ``TRITON_INTERPRET=1`` was set before the process began:

    TRITON_INTERPRET=1 pytest tests/kernels/triton

Without it, ``tests/kernels/test_triton_interpreted.py`` runs them in such a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from octavo.kernels.ops import AttentionMetadata, LayerKVCache

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "tests/kernels/triton is left out here: it needs TRITON_INTERPRET=1"
    return None


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_interpreted() -> None:
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    assert triton.knobs.runtime.interpret
    assert isinstance(triton.jit(lambda: None), InterpretedFunction)


@pytest.fixture(autouse=True)
def _fresh_memory_is_poisoned() -> Iterator[None]:
    """``torch.empty`` gives NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class PoisonedBatch:
    """Rows of (seq_len, query_len) over a paged cache that is NaN wherever no query may look.

    Blocks lie scattered. The queries are a view of a wider tensor, as a fused projection gives them.
    """

    rows: Sequence[tuple[int, int]]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    seed: int = 0
    random: torch.Generator = field(init=False)
    q: Tensor = field(init=False)  # [num_tokens, num_q_heads, head_dim]
    cache: LayerKVCache = field(init=False)
    tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        num_blocks = [-(-n // self.block_size) for n, _ in self.rows]
        ids = torch.randperm(sum(num_blocks) + 3, generator=self.random).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in num_blocks]
        num_tokens = sum(count for _, count in self.rows)
        fused = self._draw(num_tokens, self.num_q_heads + 2 * self.num_kv_heads)
        self.q = fused.to(self.dtype)[:, : self.num_q_heads]
        self.cache = LayerKVCache(self._poisoned_blocks(), self._poisoned_blocks())
        for row in range(len(self.rows)):
            self._fill(row)

    def _draw(self, num_tokens: int, num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, self.head_dim, generator=self.random)

    def _poisoned_blocks(self) -> Tensor:
        num_blocks = sum(len(table) for table in self.tables) + 3
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        dtype = self.cache_dtype or self.dtype
        return torch.full(shape, float("nan")).to(dtype)

    def _fill(self, row: int) -> None:
        seq_len, count = self.rows[row]
        first = 0 if self.window is None else max(0, seq_len - count - self.window + 1)
        for tensor in self.cache:
            numbers = self._draw(seq_len, self.num_kv_heads).to(tensor.dtype)
            for position in range(first, seq_len):
                block = self.tables[row][position // self.block_size]
                tensor[block, position % self.block_size] = numbers[position]

    def metadata(self) -> AttentionMetadata:
        width = max(len(table) for table in self.tables)
        tables = [table + [table[0]] * (width - len(table)) for table in self.tables]
        counts = [count for _, count in self.rows]
        lengths = [seq_len for seq_len, _ in self.rows]
        starts = torch.tensor([0, *counts]).cumsum(0)
        return AttentionMetadata(
            query_start_loc=starts.int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.full((int(starts[-1]),), -1),
            query_lens_host=counts,
            seq_lens_host=lengths,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
        )


@pytest.fixture(scope="session")
def make_batch() -> type[PoisonedBatch]:
    return PoisonedBatch
