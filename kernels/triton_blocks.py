"""Moves of whole KV blocks in Triton: all layers in one launch, by a table of the layers' addresses.

A block of a layer is contiguous memory whatever the layout, so it is moved as words. Blocks of one memory are
copied, and those of a device and of host memory that the device can address are moved, by the same kernel.
"""

# Kernel parameters carry no annotations but tl.constexpr: Triton reads them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ops import LayerKVCache

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
MAX_WORDS = 1024
"""Words that a program moves."""


@triton.jit
def move_blocks_kernel(
    src_table_ptr,  # [num_tensors] int64, where each tensor begins
    dst_table_ptr,  # [num_tensors] int64
    src_ptr,  # [num_pairs] int64, block ids
    dst_ptr,  # [num_pairs] int64
    block_words,  # of one block of one tensor
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    pair = tl.program_id(1)
    tensor = tl.program_id(2)
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = words < block_words
    source = tl.load(src_table_ptr + tensor)
    target = tl.load(dst_table_ptr + tensor)
    source += tl.load(src_ptr + pair) * block_words * WORD_BYTES
    target += tl.load(dst_ptr + pair) * block_words * WORD_BYTES
    source = source.to(tl.pointer_type(WORD))
    target = target.to(tl.pointer_type(WORD))
    if IS_ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    tl.store(target + words, tl.load(source + words, mask=is_inside), mask=is_inside)


class BlockMover:
    """Copies blocks between the tensors of layers. Keeps the last tables of addresses."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def move(
        self,
        src_caches: Sequence[LayerKVCache],
        dst_caches: Sequence[LayerKVCache],
        src: Tensor,
        dst: Tensor,
    ) -> None:
        """Copy blocks ``src [n] int64`` to blocks ``dst [n] int64``, in every layer, in no order.

        Args:
            src, dst: on the device that runs the kernel.
        """
        sources, targets = (
            [x for cache in caches for x in cache] for caches in (src_caches, dst_caches)
        )
        if not sources or not len(src):
            return
        block_bytes = sources[0].stride(0) * sources[0].element_size()
        for tensor in (*sources, *targets):
            if tensor.stride(0) * tensor.element_size() != block_bytes:
                raise ValueError("the blocks of all layers must have one size")
        launch = move_launch(block_bytes, [x.data_ptr() for x in (*sources, *targets)])
        block_words = block_bytes // launch["WORD_BYTES"]
        grid = (triton.cdiv(block_words, launch["BLOCK"]), len(src), len(sources))
        move_blocks_kernel[grid](
            self._table(sources, src.device),
            self._table(targets, src.device),
            src,
            dst,
            block_words,
            enable_fp_fusion=True,
            **launch,
        )

    def _table(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        table = self._tables.get(addresses)
        if table is None or table.device != device:
            on_host = torch.tensor(addresses, pin_memory=device.type == "cuda")
            table = on_host.to(device, non_blocking=True)
            if len(self._tables) > 3:  # the pool's and the host tier's; others are gone
                self._tables.clear()
            self._tables[addresses] = table
        return table


def move_launch(block_bytes: int, addresses: Sequence[int]) -> dict[str, Any]:
    """Constants of a launch over blocks of that size in tensors that begin at ``addresses``."""
    word_bytes = next(n for n in WORDS if all(x % n == 0 for x in (block_bytes, *addresses)))
    block = min(MAX_WORDS, triton.next_power_of_2(block_bytes // word_bytes))
    return {
        "WORD": _TYPES[word_bytes],
        "WORD_BYTES": word_bytes,
        "BLOCK": block,
        "IS_ALIGNED": all(x % 16 == 0 for x in (block_bytes, *addresses)),
        "num_warps": max(1, min(4, block // 256)),
    }
