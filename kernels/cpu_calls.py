"""How a native op is called: at once, or noted in a recording that is replayed.

Owns the library and the numbers that instructions read. Must not know what any op computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .cpu_recording import Capacity, Cells, Recording, needed_capacity
from .cpu_structs import Args, Instruction, program, run_program
from .ops import AttentionMetadata, Forward

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class NativeCalls:
    """What all native ops have in common.

    Args:
        library: from :func:`~.cpu_build.load_library`.
    """

    name = "cpu"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._cells = Cells()
        self._recording: Recording | None = None

    def record_step(self, forward: Forward) -> Forward:
        """``forward``, with all of a step's ops in one native call.

        It is called when a step has more tokens, rows or blocks than any before, to record its ops anew;
        they must depend on nothing but the arguments' sizes.
        """
        return _RecordedStep(self, forward)

    def record(self, forward: Forward, capacity: Capacity, num_groups: int) -> Recording:
        """Call ``forward`` with room for ``capacity``; its ops are noted and not run."""
        recording = Recording(capacity, num_groups)
        self._recording = recording
        try:
            hidden = forward(recording.token_ids, recording.positions, recording.metadata)
        finally:
            self._recording = None
        recording.finish(hidden)
        return recording

    def run(self, instructions: ctypes.Array[Instruction]) -> None:
        """Run a program on as many threads as torch uses."""
        run_program(self._library, instructions, torch.get_num_threads())

    def _do(self, args: Args) -> None:
        if self._recording is not None:
            self._recording.add(args)
        else:
            self.run(program([args]))

    def _empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        if self._recording is not None:
            return self._recording.arena.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype)

    def _tokens(self, x: Tensor) -> int:
        """Address of the number of tokens, those of ``x``."""
        if self._recording is not None:
            return self._recording.cells.num_tokens
        self._cells.set(x.shape[0])
        return self._cells.num_tokens

    def _rows_of(self, metadata: AttentionMetadata) -> Cells:
        if self._recording is not None:
            return self._recording.cells
        tables = metadata.block_tables
        self._cells.set(0, len(metadata.seq_lens), tables.stride(0))
        return self._cells


class _RecordedStep:
    """Records when a step needs more room than there is, replays otherwise."""

    def __init__(self, ops: NativeCalls, forward: Forward) -> None:
        self._ops = ops
        self._forward = forward
        self._recording: Recording | None = None

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]
    ) -> Tensor:
        needed = needed_capacity(token_ids, metadata)
        recording = self._recording
        if recording is None or not recording.capacity.holds(needed):
            known = Capacity(0, 0, 0) if recording is None else recording.capacity
            grown = known.grown(needed)
            recording = self._recording = self._ops.record(self._forward, grown, len(metadata))
        return recording.replay(token_ids, positions, metadata, self._ops.run)


def require(is_met: bool, wrong: str) -> None:
    """What torch would refuse, C++ would read past the end of."""
    if not is_met:
        raise ValueError(f"native ops do not compute {wrong}")


def address_of(x: Tensor) -> int:
    """Address of a tensor whose innermost dimension is contiguous."""
    if x.stride(-1) != 1 or x.dtype != torch.float32:
        raise ValueError(f"native ops need float32 rows, not {x.dtype} with strides {x.stride()}")
    return x.data_ptr()
