"""A step's native ops, recorded once and replayed in one call.

While a forward pass is recorded, ops compute nothing: each leaves an instruction with the addresses of its
tensors. Addresses stay good because every tensor of the pass lies in an arena that gives memory out again
only within the recording, exactly as it will be reused in each replay. What changes from step to step (token
ids, block tables, the number of tokens) is copied to where the instructions look for it.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu_structs import TOKENWISE, Args, Instruction, program
from .ops import AttentionMetadata

Run = Callable[["ctypes.Array[Instruction]"], None]

ALIGNMENT = 64


class Cells:
    """Numbers that instructions read anew each time they run."""

    def __init__(self) -> None:
        self._values = np.zeros(3, dtype=np.int64)
        address = self._values.ctypes.data
        self.num_tokens, self.num_rows, self.table_stride = (address + 8 * i for i in range(3))

    def set(self, num_tokens: int, num_rows: int = 0, table_stride: int = 0) -> None:
        self._values[:] = num_tokens, num_rows, table_stride


class Arena:
    """Memory for the tensors of one recording.

    What a dead tensor had is given to another of its size after the next :meth:`release`: ops that run
    without a barrier between them must not share memory by reuse.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._held: list[tuple[int, Tensor]] = []
        self._blocks: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        num_bytes = max(1, math.prod(shape)) * dtype.itemsize
        free = self._free.setdefault(num_bytes, [])
        if not free:
            block = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
            self._blocks.append(block)
            free.append(block)
        block = free.pop()
        address = -(-block.data_ptr() // ALIGNMENT) * ALIGNMENT
        holder = (ctypes.c_char * num_bytes).from_address(address)
        # the tensor's storage keeps the holder alive
        weakref.finalize(holder, self._held.append, (num_bytes, block))
        return torch.frombuffer(holder, dtype=dtype)[: math.prod(shape)].view(tuple(shape))

    def release(self) -> None:
        """A barrier: what died before it may be given out again."""
        while self._held:
            num_bytes, block = self._held.pop()
            self._free[num_bytes].append(block)


class Capacity(NamedTuple):
    """What a recording has room for."""

    num_tokens: int
    num_rows: int
    table_entries: int  # rows times the longest block table

    def holds(self, other: Capacity) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def grown(self, other: Capacity) -> Capacity:
        """Room for both, in powers of two so that it seldom grows again."""
        return Capacity(*(_power_of_two(max(pair)) for pair in zip(self, other, strict=True)))


class Recording:
    """A forward pass as a program."""

    def __init__(self, capacity: Capacity, num_groups: int) -> None:
        num_tokens, num_rows, table_entries = capacity
        self.capacity = capacity
        self.cells = Cells()
        self.arena = Arena()
        self.steps: list[Args] = []
        self.kept: list[object] = []
        """What the instructions point at and nobody else keeps."""
        self.token_ids = torch.zeros(num_tokens, dtype=torch.int64)
        self.positions = torch.zeros(num_tokens, dtype=torch.int64)
        self.query_start_loc = torch.zeros(num_rows + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32)
        self.metadata = [
            AttentionMetadata(
                query_start_loc=self.query_start_loc,
                seq_lens=self.seq_lens,
                block_tables=torch.zeros((1, table_entries), dtype=torch.int32),
                slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
                query_lens_host=(),
                seq_lens_host=(),
                max_query_len=num_tokens,
                max_seq_len=0,
            )
            for _ in range(num_groups)
        ]
        self._hidden: Tensor | None = None
        self._program: ctypes.Array[Instruction] | None = None

    def add(self, step: Args) -> None:
        """Note an op."""
        if step.op not in TOKENWISE:
            self.arena.release()
        self.steps.append(step)

    def finish(self, hidden: Tensor) -> None:
        """All ops have been called; ``hidden`` is their result."""
        self._hidden = hidden
        self._program = program(self.steps)

    def replay(
        self, token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata], run: Run
    ) -> Tensor:
        """Compute a step. The result is overwritten by the next one.

        Raises:
            ValueError: the groups' block tables differ in shape.
        """
        if self._hidden is None or self._program is None:
            raise RuntimeError("a recording is replayed before it is finished")
        rows = metadata[0]
        num_tokens, num_rows, shape = len(token_ids), len(rows.seq_lens), rows.block_tables.shape
        self.token_ids[:num_tokens] = token_ids
        self.positions[:num_tokens] = positions
        self.query_start_loc[: num_rows + 1] = rows.query_start_loc
        self.seq_lens[:num_rows] = rows.seq_lens
        for mine, given in zip(self.metadata, metadata, strict=True):
            tables = given.block_tables
            if tables.shape != shape:
                raise ValueError(f"block tables of {tables.shape} and {shape} in one step")
            mine.slot_mapping[:num_tokens] = given.slot_mapping
            mine.block_tables[0, : tables.numel()] = tables.reshape(-1)
        self.cells.set(num_tokens, num_rows, shape[1])
        run(self._program)
        return self._hidden[:num_tokens]


def needed_capacity(token_ids: Tensor, metadata: Sequence[AttentionMetadata]) -> Capacity:
    rows = metadata[0]
    return Capacity(len(token_ids), len(rows.seq_lens), rows.block_tables.numel())


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
