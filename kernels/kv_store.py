"""A layer's keys and values: their memory, writes to their slots, moves of whole blocks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import KVCacheSpec, LayerKVCache


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Where the tokens of a step go. The same for keys, values and every layer."""

    tokens: Tensor | None  # [num_stored] int64, indices of the tokens with a slot; None: all
    slots: Tensor  # [num_stored] int64
    started_blocks: Tensor | None  # [n] int64, blocks that a token begins: cleared first

    def store(self, source: Tensor, target: Tensor) -> None:
        """Write ``source [num_tokens, ...]`` into ``target [num_blocks, block_size, ...]``."""
        if self.started_blocks is not None:
            target.index_fill_(0, self.started_blocks, 0.0)
        chosen = source if self.tokens is None else source.index_select(0, self.tokens)
        flat = target.view(target.shape[0] * target.shape[1], -1)
        flat.index_copy_(0, self.slots, chosen.flatten(1).to(target.dtype))


def plan_store(slot_mapping: Tensor, block_size: int) -> StorePlan:
    """Read ``slot_mapping [num_tokens] int64`` once for the whole step."""
    is_stored = slot_mapping >= 0
    tokens = None
    slots = slot_mapping
    if not bool(is_stored.all()):
        tokens = is_stored.nonzero().squeeze(1)
        slots = slot_mapping.index_select(0, tokens)
    started = torch.div(slots[slots % block_size == 0], block_size, rounding_mode="floor")
    return StorePlan(tokens, slots, started if len(started) else None)


def allocate_kv_cache(spec: KVCacheSpec, device: torch.device) -> LayerKVCache:
    """``[num_blocks, block_size, num_kv_heads, head_dim]`` zeros, for keys and for values."""
    shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    if device.type == "cpu":
        return LayerKVCache(untouched_zeros(shape, spec.dtype), untouched_zeros(shape, spec.dtype))
    return LayerKVCache(
        torch.zeros(shape, dtype=spec.dtype, device=device),
        torch.zeros(shape, dtype=spec.dtype, device=device),
    )


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the kernel provides on first use; ``torch.zeros`` would write them all."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def move_blocks(source: Tensor, target: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy blocks ``src [n] int64`` of one tensor to blocks ``dst [n] int64`` of another; no id twice
    in ``dst``. Dimension 0 of both is the block."""
    if source.device == target.device:
        chosen = source.flatten(1).index_select(0, src.to(source.device))
        target.view(target.shape[0], -1).index_copy_(0, dst.to(target.device), chosen)
        return
    for first, to_first, count in neighbours(src.tolist(), dst.tolist()):
        target[to_first : to_first + count].copy_(source[first : first + count], non_blocking=True)


def neighbours(src: Sequence[int], dst: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Join pairs that count up together: (0, 5), (1, 6), (9, 7) → (0, 5, 2 pairs), (9, 7, 1 pair)."""
    begin = 0
    for end in range(1, len(src) + 1):
        length = end - begin
        if end < len(src) and (src[end], dst[end]) == (src[begin] + length, dst[begin] + length):
            continue
        yield src[begin], dst[begin], length
        begin = end
