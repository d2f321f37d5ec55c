"""How much of a GPU the KV cache gets, from numbers alone; and, on a GPU, that the promised share stays free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.errors import ConfigError
from octavo.engine.execution.gpu_memory import (
    GRANULE_BYTES,
    MemoryProfile,
    num_blocks_that_fit,
)

GIB = 1 << 30
BLOCK = 64 * 32768  # 32 layers, keys and values, 32 KiB each
PROFILE = MemoryProfile(total=80 * GIB, outside=1 * GIB, weights=16 * GIB, activations=2 * GIB)


def _blocks(profile: MemoryProfile, utilization: float) -> int:
    return num_blocks_that_fit(profile, utilization, BLOCK, 64)


def test_what_is_left_of_the_share_becomes_blocks() -> None:
    assert _blocks(PROFILE, 0.5) == (40 - 19) * GIB // BLOCK


def test_what_others_hold_is_not_promised_twice() -> None:
    crowded = PROFILE._replace(outside=11 * GIB)
    assert _blocks(PROFILE, 0.5) - _blocks(crowded, 0.5) == 10 * GIB // BLOCK


@given(
    st.integers(1, 200 * GIB),
    st.floats(0.01, 1.0),
    st.tuples(*[st.integers(0, 50 * GIB)] * 3),
    st.integers(1, 100),
    st.integers(1, 1 << 20),
)
def test_the_promised_share_stays_free(
    total: int, utilization: float, used: tuple[int, int, int], num_tensors: int, part: int
) -> None:
    """As torch takes memory: each tensor in whole granules. One block more would break the promise."""

    def taken(num_blocks: int) -> int:
        tensor = -(-num_blocks * part // GRANULE_BYTES) * GRANULE_BYTES
        return sum(used) + num_tensors * tensor

    usable = int(total * utilization)
    try:
        num_blocks = num_blocks_that_fit(
            MemoryProfile(total, *used), utilization, num_tensors * part, num_tensors
        )
    except ConfigError:
        num_blocks = 0
    else:
        assert taken(num_blocks) <= usable
    assert taken(num_blocks + 1) > usable


@pytest.mark.parametrize(
    "changes", [{"outside": 70 * GIB}, {"weights": 79 * GIB}, {"activations": 60 * GIB}]
)
def test_no_room_is_refused_with_every_number(changes: dict[str, int]) -> None:
    profile = PROFILE._replace(**changes)
    with pytest.raises(ConfigError, match="leaves no room for a KV block") as refused:
        _blocks(profile, 0.9)
    for number in (*profile, int(0.9 * profile.total), BLOCK):
        assert str(number) in str(refused.value)


@pytest.mark.gpu
def test_a_started_engine_leaves_the_promised_share_free(tmp_path: Path) -> None:
    """With another process's memory counted: here, what this one holds outside torch's allocator is small, so
    the whole promise shows in what the device says is free."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from octavo.engine.build import build_core
    from octavo.engine.config.engine_config import EngineConfig

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=4, **sizes))
    model.save_pretrained(tmp_path)
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.1
    config = EngineConfig.from_options({"model": str(tmp_path), "gpu_memory_utilization": share})
    core, info = build_core(config, 0)
    free, total = torch.cuda.mem_get_info()
    assert total * (1 - share) <= free < total * (1 - share) + (1 << 30)
    assert info.num_blocks > 0
    del core
