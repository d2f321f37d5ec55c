"""Blocks leave for the host tier and come back as they were, in the plan's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.execution.errors import ExecutionError
from octavo.engine.execution.host_tier import HostTier
from octavo.engine.step import BlockCopy, BlockSwap
from octavo.kernels.ops import KVCacheSpec, Ops
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_ops import TorchOps

PROMPT = [3, 14, 15, 9, 26, 5, 3, 5, 8]
CPU = torch.device("cpu")


def _record_logits(model: Any) -> list[torch.Tensor]:
    """Of every step from here on."""
    recorded: list[torch.Tensor] = []
    logits = model.logits

    def spy(hidden: torch.Tensor) -> Any:
        recorded.append(logits(hidden))
        return recorded[-1].clone()

    model.logits = spy
    return recorded


def _decode(driver: Any, first: int, count: int) -> None:
    for start in range(first, first + count):
        driver.step([driver.row(0, start, 1)])


@pytest.mark.parametrize("ops", [TorchOps(), ReferenceOps()], ids=["torch", "reference"])
def test_swapped_out_and_in_the_logits_are_bit_equal(make_driver: Any, ops: Ops) -> None:
    """Others overwrite every block meanwhile, and it comes back to different ones."""
    logits = []
    for is_swapped in (False, True):
        driver = make_driver(num_blocks=10, num_host_blocks=5, ops=ops)
        driver.generate(0, PROMPT, 3)
        if is_swapped:
            table = driver.tables[0]
            out = [BlockSwap(0, block, 4 - i, True) for i, block in enumerate(table)]
            driver.free += table
            driver.step(block_swaps=tuple(out))
            driver.generate(1, [30] * 37, 2)
            driver.remove(1)
            driver.tables[0] = [driver.free.pop() for _ in table]
            assert driver.tables[0] != table
            back = [BlockSwap(0, block, 4 - i, False) for i, block in enumerate(driver.tables[0])]
            row = driver.row(0, len(PROMPT) + 2, 1, first_changed_block=0)
            recorded = _record_logits(driver.runner._model)
            driver.step([row], block_swaps=tuple(back))
        else:
            recorded = _record_logits(driver.runner._model)
            _decode(driver, len(PROMPT) + 2, 1)
        _decode(driver, len(PROMPT) + 3, 4)
        logits.append(torch.cat(recorded))
    assert logits[0].shape[0] == 5
    assert torch.equal(*logits)


class _Tier:
    """A tier of 4 blocks beside a pool of 3, in 2 layers; each block is filled with one number."""

    def __init__(self, ops: Ops) -> None:
        spec = KVCacheSpec(3, 2, 1, 4, torch.float32)
        self.device = [ops.allocate_kv_cache(spec, CPU) for _ in range(2)]
        host_spec = KVCacheSpec(4, 2, 1, 4, torch.float32)
        self.tier = HostTier(ops, host_spec, self.device, CPU)
        for layer in range(2):
            for is_value in range(2):
                base = 100 * layer + 10 * is_value
                self.device[layer][is_value].copy_(torch.arange(3.0).view(3, 1, 1, 1) + base)
                host = self.tier._host_caches[layer][is_value]
                host.copy_(torch.arange(3.0, 7.0).view(4, 1, 1, 1) + base)

    def numbers(self, is_host: bool) -> list[int]:
        """What the blocks hold, the same in every layer and in every element."""
        found = []
        for layer in range(2):
            for is_value in range(2):
                caches = self.tier._host_caches if is_host else self.device
                tensor = caches[layer][is_value] - (100 * layer + 10 * is_value)
                assert bool((tensor == tensor[:, :1, :1, :1]).all())
                found.append([int(number) for number in tensor[:, 0, 0, 0]])
        assert all(numbers == found[0] for numbers in found)
        return found[0]


_SWAPS = st.lists(
    st.builds(BlockSwap, st.just(0), st.integers(0, 2), st.integers(0, 3), st.booleans()),
    max_size=12,
)


@given(swaps=_SWAPS, is_reference=st.booleans())
@settings(max_examples=200)
def test_swaps_happen_in_order(swaps: list[BlockSwap], is_reference: bool) -> None:
    """Chains through one block, and blocks that are a target twice, included."""
    tier = _Tier(ReferenceOps() if is_reference else TorchOps())
    device, host = tier.numbers(False), tier.numbers(True)
    tier.tier.move(swaps)
    for swap in swaps:
        if swap.to_host:
            host[swap.host_block_id] = device[swap.device_block_id]
        else:
            device[swap.device_block_id] = host[swap.host_block_id]
    assert tier.numbers(False) == device
    assert tier.numbers(True) == host


def test_neighbours_in_one_direction_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(TorchOps, "swap_blocks", lambda self, *args: calls.append(args[2:]))
    tier = _Tier(TorchOps())
    out = [BlockSwap(0, block, block + 1, True) for block in range(3)]
    back = [BlockSwap(0, block, 3 - block, False) for block in (2, 0)]
    again = BlockSwap(0, 0, 1, False)  # the same target: a call of its own
    tier.tier.move([*out, *back, again])
    ids = [(src.tolist(), dst.tolist()) for src, dst in calls]
    assert ids == [([0, 1, 2], [1, 2, 3]), ([1, 3], [2, 0]), ([1], [0])]


def test_swaps_come_before_copies(make_driver: Any) -> None:
    """A block that comes in is copied in the same plan."""
    driver = make_driver(num_host_blocks=2)
    driver.generate(0, PROMPT, 1)
    first = driver.tables[0][0]
    out, back = BlockSwap(0, first, 1, True), BlockSwap(0, 1, 1, False)
    driver.step(block_swaps=(out, back), block_copies=(BlockCopy(0, 1, 2),))
    for cache in driver.runner._kv_caches:
        assert bool(cache.key[first].any())
        assert torch.equal(cache.key[2], cache.key[first])


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        (BlockSwap(0, 40, 0, True), "outside the pool of 40"),
        (BlockSwap(0, -1, 0, False), "outside the pool of 40"),
        (BlockSwap(0, 0, 5, False), "outside the host tier of 5"),
        (BlockSwap(0, 0, -1, True), "outside the host tier of 5"),
    ],
)
def test_blocks_that_do_not_exist(make_driver: Any, swap: BlockSwap, message: str) -> None:
    driver = make_driver(num_host_blocks=5)
    driver.generate(0, PROMPT, 1)
    before = driver.runner._kv_caches[0].key.clone()
    good = BlockSwap(0, driver.tables[0][0], 1, False)
    with pytest.raises(ExecutionError, match=message):
        driver.step(block_swaps=(good, swap))
    assert torch.equal(driver.runner._kv_caches[0].key, before)


def test_the_time_of_swaps_is_reported(make_driver: Any) -> None:
    driver = make_driver(num_host_blocks=5)
    row, new = driver.row(0, 0, len(PROMPT)), driver.new(0, PROMPT)
    swap = BlockSwap(0, 0, 0, True)
    runner = driver.runner
    plan = driver.plan([row], new_rows=(new,), block_swaps=(swap,))
    assert runner.submit(plan).result().swap_s > 0.0
    assert runner.submit(driver.plan(block_swaps=(swap,))).result().swap_s > 0.0
    plan = driver.plan([driver.row(0, len(PROMPT), 1)])
    assert runner.submit(plan).result().swap_s == 0.0


@pytest.mark.parametrize("num_host_blocks", [0, 1, 50])
def test_warm_up_measures(make_driver: Any, num_host_blocks: int) -> None:
    driver = make_driver(num_host_blocks=num_host_blocks)
    rates = driver.runner.warm_up(20)
    assert rates.prefill_tokens_per_s > 0.0
    assert (rates.swap_bytes_per_s > 0.0) == (num_host_blocks > 0)


def test_measuring_the_swaps_changes_no_block(make_driver: Any) -> None:
    driver = make_driver(num_host_blocks=50)
    driver.runner.warm_up(20)
    keys = torch.randn(driver.runner._kv_caches[0].key.shape)
    driver.runner._kv_caches[0].key.copy_(keys)
    assert driver.runner._swap_rate() > 0.0
    assert torch.equal(driver.runner._kv_caches[0].key, keys)
