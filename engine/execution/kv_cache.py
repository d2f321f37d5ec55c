"""How many KV blocks there are, on the device and in the host tier: the rules of their options.

On a GPU, ``--gpu-memory-utilization`` is a share of the device's total memory for this process alone:
what others use does not change the number of blocks, so the order in which servers start does not
matter. That the memory is really free is checked, and refused with the numbers if not.
"""

from __future__ import annotations

import torch

from ...kernels.ops import Ops
from ...kernels.select import select_ops
from ..config import EngineConfig, available_memory_bytes, flag_of, step_limits
from ..errors import ConfigError
from ..models.model import Model
from .runner import ModelRunner

CPU_DEFAULT_BYTES = 512 << 20
CUDA_CONTEXT_BYTES = 512 << 20
"""What a process holds on a GPU besides torch's own memory: context, kernels, library workspaces."""


def kv_block_bytes(model: Model, block_size: int) -> int:
    """Bytes of one block over all layers, keys and values."""
    return model.kv_cache_spec(1, block_size).block_bytes * model.num_layers


def num_blocks_for(
    config: EngineConfig, model: Model, device: torch.device, *, max_model_len: int | None
) -> int:
    """Size the pool.

    ``--num-gpu-blocks-override`` beats ``--kv-cache-memory-bytes``, which beats the default: on a CPU
    512 MiB or one sequence of ``max_model_len`` (the model's window if ``None``), whichever is more,
    but at most a quarter of the memory that is left; on a GPU what ``--gpu-memory-utilization`` leaves
    after weights and the activations of the largest step.

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
    elif device.type == "cuda":
        budget = _cuda_budget_bytes(config, model, device)
        option, num_blocks = "gpu_memory_utilization", budget // block_bytes
    else:
        window = max_model_len or model.spec.max_position_embeddings
        sequence_bytes = -(-window // cache.block_size) * block_bytes
        budget = min(max(CPU_DEFAULT_BYTES, sequence_bytes), available // 4)
        option, num_blocks = "kv_cache_memory_bytes", budget // block_bytes
    _check(flag_of(option), num_blocks, block_bytes, available)
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


def _check(flag: str, num_blocks: int, block_bytes: int, available: int) -> None:
    if num_blocks < 1:
        raise ConfigError(
            f"{flag} leaves no room for a KV block: one needs {block_bytes} bytes; "
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


def _cuda_budget_bytes(config: EngineConfig, model: Model, device: torch.device) -> int:
    """What is left for KV of this process's share of the device. 0 if nothing is."""
    _, total = torch.cuda.mem_get_info(device)
    share = int(total * config.cache.gpu_memory_utilization)
    ops = select_ops(config.execution.attention_backend, device)
    peak = _cuda_peak_bytes(config, model, ops, device)
    return max(0, share - CUDA_CONTEXT_BYTES - peak)


def _cuda_peak_bytes(config: EngineConfig, model: Model, ops: Ops, device: torch.device) -> int:
    """Most memory that weights and the activations of the largest step take, without the KV cache."""
    block_size = config.cache.block_size
    num_tokens, num_rows, _ = step_limits(config.scheduler, on_gpu=True)
    num_blocks = -(-num_tokens // block_size) + num_rows
    torch.cuda.reset_peak_memory_stats(device)
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
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del runner
    torch.cuda.empty_cache()
    return peak - num_blocks * kv_block_bytes(model, block_size)
