"""How much of a GPU the KV cache may have, from what was measured of its memory.

``--gpu-memory-utilization`` promises that a share of the device stays free. So what other processes hold
counts, whoever starts first; where the promise leaves no room, the start is refused with the numbers.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from ...kernels.ops import Ops
from ..checkpoint.kv_groups import kv_groups, layers_per_block
from ..config.engine_config import EngineConfig
from ..config.options import flag_of
from ..config.step_limits import step_limits
from ..errors import ConfigError
from ..models.model import Model
from .runner import ModelRunner

GRANULE_BYTES = 2 << 20
"""Torch takes memory for large tensors from the device in multiples of this."""


class MemoryProfile(NamedTuple):
    """A device's memory when the weights are in place and the largest step has run once. In bytes."""

    total: int
    outside: int  # held by other processes, and by this one outside torch: context, libraries
    weights: int
    activations: int  # most that the largest step needed besides; its KV cache is not counted


def num_blocks_that_fit(
    profile: MemoryProfile, utilization: float, block_bytes: int, num_tensors: int
) -> int:
    """KV blocks that leave ``1 - utilization`` of the device free.

    Args:
        block_bytes: of one block over all layers.
        num_tensors: that a block is spread over: each is rounded up to what torch takes.

    Raises:
        ConfigError: not one fits; names what the memory is used for.
    """
    usable = int(profile.total * utilization)
    left = usable - profile.outside - profile.weights - profile.activations
    by_tensor = max(0, left) // num_tensors // GRANULE_BYTES * GRANULE_BYTES
    num_blocks = by_tensor // (block_bytes // num_tensors)
    if num_blocks < 1:
        raise ConfigError(
            f"{flag_of('gpu_memory_utilization')} {utilization:g} leaves no room for a KV block of {block_bytes} "
            f"bytes: it allows {usable} of the GPU's {profile.total} bytes, and {profile.outside} are held outside "
            f"the engine (by other processes, and for the GPU's context), {profile.weights} by the weights, and "
            f"{profile.activations} are needed for the largest step."
        )
    return num_blocks


def profile_memory(
    config: EngineConfig, model: Model, ops: Ops, device: torch.device
) -> MemoryProfile:
    """Run the largest step once, on a small pool that is given back, and measure.

    Raises:
        ConfigError: it does not fit the memory that is free.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_reserved(device)
    try:
        kv_bytes = _run_largest_step(config, model, ops, device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"The largest step does not fit: the weights hold {weights} of the GPU's {total} bytes and {free} are "
            f"free; lower {flag_of('max_num_batched_tokens')} or {flag_of('max_num_seqs')}."
        ) from error
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    gc.collect()  # the runner's parts know each other
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = int(total) - int(free) - torch.cuda.memory_reserved(device)
    return MemoryProfile(int(total), max(0, outside), weights, max(0, peak - kv_bytes - weights))


def _run_largest_step(config: EngineConfig, model: Model, ops: Ops, device: torch.device) -> int:
    """Bytes of the KV cache that it ran with."""
    block_size = config.cache.block_size
    num_tokens, num_rows, _ = step_limits(config.scheduler, on_gpu=True)
    num_blocks = -(-num_tokens // block_size) + num_rows  # which all KV groups use
    runner = ModelRunner(
        model,
        ops,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=num_rows,
        max_model_len=min(num_tokens, model.spec.max_position_embeddings),
        device=device,
        eos_token_ids=(),
    )
    runner.warm_up(num_tokens, num_rows)
    num_caches = layers_per_block(kv_groups(model.spec))
    return model.kv_cache_spec(num_blocks, block_size).block_bytes * num_blocks * num_caches
