"""The host tier: KV blocks in host memory, and the moves between them and the device's pool.

Owns the host's tensors and the order of moves. Must not know whose blocks they are or why they move.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels.ops import KVCacheSpec, LayerKVCache, Ops
from ..step import BlockSwap
from .errors import ExecutionError


class HostTier:
    """Blocks in host memory, beside the device's."""

    def __init__(
        self,
        ops: Ops,
        spec: KVCacheSpec,
        device_caches: Sequence[LayerKVCache],
        device: torch.device,
    ) -> None:
        """
        Args:
            spec: of one layer in the host's memory, at least one block.
            device_caches: one per layer that a block has room for.
        """
        self._ops = ops
        self._device = device
        self._device_caches = list(device_caches)
        self._num_device_blocks = len(device_caches[0].key)
        self.num_blocks = spec.num_blocks
        host = torch.device("cpu")
        self._host_caches = [ops.allocate_kv_cache(spec, host) for _ in device_caches]
        if device.type == "cuda":
            for cache in self._host_caches:
                _pin(cache)

    def move(self, swaps: Sequence[BlockSwap]) -> Callable[[], float]:
        """Copy blocks in the order given; neighbours in one direction go together.

        Returns:
            A function that says how many seconds it took, and on a GPU waits for that.

        Raises:
            ExecutionError: there is no such block; nothing is copied.
        """
        for swap in swaps:
            self._check(swap)
        if self._device.type == "cuda":
            return self._move_on_stream(swaps)
        begin = time.perf_counter()
        self._move(swaps)
        seconds = time.perf_counter() - begin
        return lambda: seconds

    def _move(self, swaps: Sequence[BlockSwap]) -> None:
        for run in swap_runs(swaps):
            device = (self._device_caches, torch.tensor([swap.device_block_id for swap in run]))
            host = (self._host_caches, torch.tensor([swap.host_block_id for swap in run]))
            source, target = (device, host) if run[0].to_host else (host, device)
            self._ops.swap_blocks(source[0], target[0], source[1], target[1])

    def _move_on_stream(self, swaps: Sequence[BlockSwap]) -> Callable[[], float]:
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        self._move(swaps)
        end.record()

        def seconds() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return seconds

    def _check(self, swap: BlockSwap) -> None:
        if not 0 <= swap.device_block_id < self._num_device_blocks:
            raise ExecutionError(
                f"a block outside the pool of {self._num_device_blocks} is swapped"
            )
        if not 0 <= swap.host_block_id < self.num_blocks:
            raise ExecutionError(f"a block outside the host tier of {self.num_blocks} is swapped")


def swap_runs(swaps: Sequence[BlockSwap]) -> Iterator[list[BlockSwap]]:
    """Cut into runs whose copies may happen in any order: one direction, no target twice.

    Within a direction sources and targets lie in different memories, so no source is a target.
    """
    run: list[BlockSwap] = []
    targets: set[int] = set()
    for swap in swaps:
        target = swap.host_block_id if swap.to_host else swap.device_block_id
        if run and (swap.to_host != run[0].to_host or target in targets):
            yield run
            run, targets = [], set()
        run.append(swap)
        targets.add(target)
    if run:
        yield run


def _pin(cache: LayerKVCache) -> None:
    """Lock host memory where it lies, so that a GPU copies without waiting for the host.

    Torch's own allocator of such memory rounds each tensor up to a power of two.
    """
    for tensor in cache:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
