"""How many KV blocks there are, on the device and in the host tier: the rules of their options."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..checkpoint.kv_groups import kv_groups, layers_per_block
from ..config.engine_config import EngineConfig
from ..config.machine import available_memory_bytes
from ..config.options import flag_of
from ..errors import ConfigError
from ..models.model import Model
from .gpu_memory import MemoryProfile, num_blocks_that_fit

CPU_DEFAULT_BYTES = 512 << 20


def kv_block_bytes(model: Model, block_size: int) -> int:
    """Bytes of one block over the layers that it has room for, keys and values."""
    num_layers = layers_per_block(kv_groups(model.spec))
    return model.kv_cache_spec(1, block_size).block_bytes * num_layers


def num_blocks_for(
    config: EngineConfig,
    model: Model,
    device: torch.device,
    *,
    num_sequence_blocks: int,
    profile: Callable[[], MemoryProfile] | None = None,
) -> int:
    """Size the pool.

    ``--num-gpu-blocks-override`` beats ``--kv-cache-memory-bytes``, which beats the default: on a CPU
    512 MiB or one longest sequence, whichever is more, but at most a quarter of the memory that is left; on a GPU what ``--gpu-memory-utilization`` leaves
    after weights, the activations of the largest step and what other processes hold.

    Args:
        num_sequence_blocks: of a longest sequence.
        profile: measures the GPU's memory; called if nothing but the default decides.

    Raises:
        ConfigError: not one block fits, or more is asked for than is available; names both numbers.
    """
    cache = config.cache
    block_bytes = kv_block_bytes(model, cache.block_size)
    available = _available_bytes(device)
    if cache.num_gpu_blocks_override is not None:
        option, num_blocks = "num_gpu_blocks_override", cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        option, num_blocks = "kv_cache_memory_bytes", cache.kv_cache_memory_bytes // block_bytes
    elif profile is not None:
        utilization = config.cache.gpu_memory_utilization
        num_tensors = 2 * layers_per_block(kv_groups(model.spec))
        option = "gpu_memory_utilization"
        num_blocks = num_blocks_that_fit(profile(), utilization, block_bytes, num_tensors)
    else:
        sequence_bytes = num_sequence_blocks * block_bytes
        budget = min(max(CPU_DEFAULT_BYTES, sequence_bytes), available // 4)
        option, num_blocks = "kv_cache_memory_bytes", budget // block_bytes
    _check(flag_of(option), num_blocks, block_bytes, available, cache.kv_cache_memory_bytes)
    return num_blocks


def num_host_blocks_for(config: EngineConfig, model: Model, *, reserved_bytes: int = 0) -> int:
    """Size the host tier from ``--swap-space``; 0 if that is 0.

    Args:
        reserved_bytes: of the host's memory, promised but not used yet: the pool's, on a CPU.

    Raises:
        ConfigError: not one block fits, or more is asked for than is available; names both numbers.
    """
    asked = int(config.cache.swap_space * 2**30)
    if config.cache.swap_space == 0:
        return 0
    block_bytes = kv_block_bytes(model, config.cache.block_size)
    available = max(0, available_memory_bytes() - reserved_bytes)
    _check(flag_of("swap_space"), asked // block_bytes, block_bytes, available)
    return asked // block_bytes


def _check(
    flag: str, num_blocks: int, block_bytes: int, available: int, asked: int | None = None
) -> None:
    if num_blocks < 1:
        given = "" if asked is None else f" {asked}"
        raise ConfigError(
            f"{flag}{given} leaves no room for a KV block: one needs {block_bytes} bytes; "
            f"{available} bytes are available."
        )
    if num_blocks * block_bytes > available:
        raise ConfigError(
            f"{flag} asks for {num_blocks} KV blocks, which need {num_blocks * block_bytes} bytes; "
            f"{available} bytes are available."
        )


def _available_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return available_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
