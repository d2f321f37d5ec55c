"""Random paged batches, and what dense attention gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.ops import AttentionMetadata, KVCacheSpec, LayerKVCache, Ops
from octavo.kernels.select import select_ops


@dataclass(frozen=True)
class Shape:
    """Heads and blocks of one attention layer."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32


class PagedBatch:
    """Rows of (seq_len, query_len) with random queries, keys, values and scattered blocks.

    Rows in ``shared`` find the KV of their query tokens written already (a full prefix hit): they are
    stored with slot -1.
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        shape: Shape,
        *,
        seed: int = 0,
        shared: Sequence[int] = (),
    ) -> None:
        self.rows, self.shape, self.shared = list(rows), shape, set(shared)
        self.random = torch.Generator().manual_seed(seed)
        self.keys = [self._draw(n, shape.num_kv_heads) for n, _ in rows]
        self.values = [self._draw(n, shape.num_kv_heads) for n, _ in rows]
        self.queries = [self._draw(count, shape.num_q_heads) for _, count in rows]
        counts = [-(-n // shape.block_size) for n, _ in rows]
        self.num_blocks = sum(counts) + 3
        ids = torch.randperm(self.num_blocks, generator=self.random).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]

    def _draw(self, num_tokens: int, num_heads: int) -> Tensor:
        size = (num_tokens, num_heads, self.shape.head_dim)
        return torch.randn(size, generator=self.random).to(self.shape.dtype)

    @property
    def q(self) -> Tensor:
        return torch.cat(self.queries)

    def slots(self, row: int, start: int, stop: int) -> list[int]:
        size = self.shape.block_size
        table = self.tables[row]
        return [table[p // size] * size + p % size for p in range(start, stop)]

    def metadata(self) -> AttentionMetadata:
        width = max(len(table) for table in self.tables)
        slots: list[int] = []
        for row, (seq_len, count) in enumerate(self.rows):
            is_shared = row in self.shared
            slots += [-1] * count if is_shared else self.slots(row, seq_len - count, seq_len)
        counts = [count for _, count in self.rows]
        seq_lens = [seq_len for seq_len, _ in self.rows]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [table + [table[0]] * (width - len(table)) for table in self.tables],
                dtype=torch.int32,
            ),
            slot_mapping=torch.tensor(slots),
            query_lens_host=counts,
            seq_lens_host=seq_lens,
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
        )

    def run(
        self,
        ops: Ops,
        *,
        scale: float = 0.25,
        window: int | None = None,
        soft_cap: float | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Store everything into a cache full of NaN, then attend."""
        cache = self.filled_cache(ops)
        metadata = self.metadata()
        k = torch.cat([key[n - c :] for key, (n, c) in zip(self.keys, self.rows, strict=True)])
        v = torch.cat([val[n - c :] for val, (n, c) in zip(self.values, self.rows, strict=True)])
        ops.store_kv(k, v, cache, metadata.slot_mapping)
        q = self.q if queries is None else queries
        return ops.attention(q, cache, metadata, scale=scale, window=window, soft_cap=soft_cap)

    def filled_cache(self, ops: Ops) -> LayerKVCache:
        """A poisoned cache that holds what earlier steps stored."""
        shape = self.shape
        spec = KVCacheSpec(
            self.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, shape.dtype
        )
        cache = ops.allocate_kv_cache(spec, torch.device("cpu"))
        cache.key.fill_(float("nan"))
        cache.value.fill_(float("nan"))
        for row, (seq_len, count) in enumerate(self.rows):
            stop = seq_len if row in self.shared else seq_len - count
            slots = torch.tensor(self.slots(row, 0, stop), dtype=torch.int64)
            if stop:
                ops.store_kv(self.keys[row][:stop], self.values[row][:stop], cache, slots)
        return cache

    def dense(
        self, *, scale: float = 0.25, window: int | None = None, soft_cap: float | None = None
    ) -> NDArray[np.float64]:
        """The textbook formula over contiguous keys and values, in float64 numpy."""
        outs = []
        for row, (seq_len, count) in enumerate(self.rows):
            q, k, v = (x[row].double().numpy() for x in (self.queries, self.keys, self.values))
            group = q.shape[1] // k.shape[1]
            k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
            scores = np.einsum("qhd,khd->hqk", q, k) * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            distance = np.arange(seq_len - count, seq_len)[:, None] - np.arange(seq_len)[None, :]
            is_seen = distance >= 0
            if window is not None:
                is_seen &= distance < window
            scores = np.where(is_seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            outs.append(np.einsum("hqk,khd->qhd", weights, v))
        return np.concatenate(outs)


@pytest.fixture(scope="session")
def make_batch() -> type[PagedBatch]:
    return PagedBatch


@pytest.fixture(scope="session")
def make_shape() -> type[Shape]:
    return Shape


@pytest.fixture(params=["torch", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select_ops(request.param, torch.device("cpu"))
