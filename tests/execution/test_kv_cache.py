"""The size of the pool, by the rules of its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.engine.config.engine_config import EngineConfig, check_preemption
from octavo.engine.errors import ConfigError
from octavo.engine.execution import kv_cache
from octavo.engine.execution.gpu_memory import MemoryProfile
from octavo.engine.execution.kv_cache import (
    CPU_DEFAULT_BYTES,
    kv_block_bytes,
    num_blocks_for,
    num_host_blocks_for,
)

CPU = torch.device("cpu")


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set how much memory the machine says it has."""

    def set_available(num_bytes: int) -> None:
        monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: num_bytes)

    set_available(64 << 30)
    return set_available


def _config(**options: Any) -> EngineConfig:
    return EngineConfig.from_options(options)


def test_bytes_of_a_block(fake_model: Any) -> None:
    # keys and values, 2 layers, 16 tokens of 1 head of 32 floats
    assert kv_block_bytes(fake_model, 16) == 2 * 2 * 16 * 32 * 4


def test_the_override_beats_everything(fake_model: Any, available: Any) -> None:
    config = _config(num_gpu_blocks_override=7, kv_cache_memory_bytes=1 << 20)
    assert num_blocks_for(config, fake_model, CPU, num_sequence_blocks=4) == 7


def test_a_size_in_bytes_is_never_exceeded(fake_model: Any, available: Any) -> None:
    block = kv_block_bytes(fake_model, 16)
    for num_bytes, expected in ((block, 1), (3 * block - 1, 2), (3 * block, 3)):
        config = _config(kv_cache_memory_bytes=num_bytes)
        assert num_blocks_for(config, fake_model, CPU, num_sequence_blocks=4) == expected


def test_the_default_on_a_cpu(fake_model: Any, available: Any) -> None:
    block = kv_block_bytes(fake_model, 16)

    def default(num_sequence_blocks: int) -> int:
        return num_blocks_for(_config(), fake_model, CPU, num_sequence_blocks=num_sequence_blocks)

    assert default(4) == CPU_DEFAULT_BYTES // block
    long = 3 * CPU_DEFAULT_BYTES // block
    assert default(long) == long  # one sequence of the window
    available(4 << 20)
    assert default(4) == (1 << 20) // block  # a quarter of what is left


def test_too_little_is_refused_with_the_numbers(fake_model: Any, available: Any) -> None:
    block = kv_block_bytes(fake_model, 16)
    with pytest.raises(ConfigError, match=rf"--kv-cache-memory-bytes .*{block} bytes"):
        num_blocks_for(_config(kv_cache_memory_bytes=1), fake_model, CPU, num_sequence_blocks=4)
    available(1000)
    with pytest.raises(ConfigError, match="1000 bytes are available"):
        num_blocks_for(_config(), fake_model, CPU, num_sequence_blocks=4)


def test_more_than_there_is_is_refused_with_the_numbers(fake_model: Any, available: Any) -> None:
    block = kv_block_bytes(fake_model, 16)
    available(10 * block)
    config = _config(num_gpu_blocks_override=11)
    with pytest.raises(
        ConfigError,
        match=rf"--num-gpu-blocks-override asks for 11 .*{11 * block} bytes; {10 * block} bytes",
    ):
        num_blocks_for(config, fake_model, CPU, num_sequence_blocks=4)


def test_on_a_gpu_the_profile_decides(fake_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 64 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    profiles = []

    def profile() -> MemoryProfile:
        profiles.append(MemoryProfile(80 << 30, 10 << 30, 16 << 30, 2 << 30))
        return profiles[-1]

    def num_blocks(**options: Any) -> int:
        config = _config(**options)
        cuda = torch.device("cuda")
        return num_blocks_for(config, fake_model, cuda, num_sequence_blocks=4, profile=profile)

    assert num_blocks(gpu_memory_utilization=0.5) == (12 << 30) // kv_block_bytes(fake_model, 16)
    assert num_blocks(num_gpu_blocks_override=7) == 7
    assert len(profiles) == 1
    free = 1 << 30
    with pytest.raises(ConfigError, match=f"{1 << 30} bytes are available"):
        num_blocks(gpu_memory_utilization=0.5)


def test_the_host_tier_is_never_larger_than_asked(fake_model: Any, available: Any) -> None:
    block = kv_block_bytes(fake_model, 16)
    assert num_host_blocks_for(_config(), fake_model) == 0
    assert num_host_blocks_for(_config(swap_space=2), fake_model) == (2 << 30) // block
    almost = (3 * block - 1) / 2**30
    assert num_host_blocks_for(_config(swap_space=almost), fake_model) == 2


def test_a_host_tier_that_cannot_be_is_refused_with_the_numbers(
    fake_model: Any, available: Any
) -> None:
    block = kv_block_bytes(fake_model, 16)
    with pytest.raises(ConfigError, match=rf"--swap-space .*one needs {block} bytes"):
        num_host_blocks_for(_config(swap_space=1e-9), fake_model)
    available(10 * block)
    config = _config(swap_space=10 * block / 2**30)
    assert num_host_blocks_for(config, fake_model) == 10
    with pytest.raises(
        ConfigError, match=rf"--swap-space asks for 10 .*{10 * block} bytes; {10 * block - 1} bytes"
    ):
        num_host_blocks_for(config, fake_model, reserved_bytes=1)


def test_swapping_needs_somewhere_to_swap_to() -> None:
    with pytest.raises(ConfigError, match=r"--preemption-mode swap .*--swap-space"):
        check_preemption(_config(preemption_mode="swap"))
    check_preemption(_config(preemption_mode="swap", swap_space=1))
    check_preemption(_config(preemption_mode="auto"))
