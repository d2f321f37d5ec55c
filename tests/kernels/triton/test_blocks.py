"""Copies of blocks in all layers by one launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.kv_store import untouched_zeros
from octavo.kernels.ops import LayerKVCache
from octavo.kernels.triton_blocks import BlockMover, move_launch
from octavo.kernels.triton_device import INTERPRETED
from octavo.kernels.triton_ops import COPY_ENGINE_BYTES, TritonOps, _moves_in_long_runs

pytestmark = pytest.mark.smoke


def _caches(shape: tuple[int, ...], dtype: torch.dtype, num_layers: int = 3) -> list[LayerKVCache]:
    def draw() -> Tensor:
        return torch.randn(shape).to(dtype)

    return [LayerKVCache(draw(), draw()) for _ in range(num_layers)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("block", [(16, 2, 80), (3, 1, 1), (2, 3, 5), (16, 4, 128)])
def test_copies_every_layer(dtype: torch.dtype, block: tuple[int, ...]) -> None:
    caches = _caches((5, *block), dtype)
    before = [[tensor.clone() for tensor in cache] for cache in caches]
    BlockMover().move(caches, caches, torch.tensor([0, 3]), torch.tensor([4, 1]))
    for cache, old in zip(caches, before, strict=True):
        for tensor, was in zip(cache, old, strict=True):
            assert torch.equal(_bytes(tensor[[4, 1]]), _bytes(was[[0, 3]]))
            assert torch.equal(_bytes(tensor[[0, 2, 3]]), _bytes(was[[0, 2, 3]]))


def test_moves_between_two_memories_of_different_size() -> None:
    source, target = (_caches((num, 2, 3, 8), torch.bfloat16) for num in (4, 9))
    mover, before = BlockMover(), [cache.key.clone() for cache in target]
    for _ in range(2):
        mover.move(source, target, torch.tensor([3, 0, 1]), torch.tensor([8, 2, 5]))
    for ours, theirs, was in zip(source, target, before, strict=True):
        assert torch.equal(theirs.key[[8, 2, 5]], ours.key[[3, 0, 1]])
        assert torch.equal(theirs.value[[8, 2, 5]], ours.value[[3, 0, 1]])
        assert torch.equal(theirs.key[[0, 1, 3, 4, 6, 7]], was[[0, 1, 3, 4, 6, 7]])


@pytest.mark.parametrize("reads_host", [True, False])
def test_swaps_by_either_way(reads_host: bool) -> None:
    ops = TritonOps(torch.device("cpu"), INTERPRETED)
    ops.reads_host = reads_host
    source, target = (_caches((num, 2, 3, 8), torch.bfloat16) for num in (4, 9))
    ops.swap_blocks(source, target, torch.tensor([3, 0]), torch.tensor([8, 2]))
    for ours, theirs in zip(source, target, strict=True):
        assert torch.equal(theirs.key[[8, 2]], ours.key[[3, 0]])
        assert torch.equal(theirs.value[[8, 2]], ours.value[[3, 0]])


def test_long_runs_are_left_to_the_copy_engines() -> None:
    blocks = torch.empty((64, COPY_ENGINE_BYTES // 8), dtype=torch.uint8, device="meta")
    ascending = torch.arange(32)
    assert _moves_in_long_runs(blocks, ascending, ascending + 7)
    assert not _moves_in_long_runs(blocks, ascending, ascending.flip(0))
    assert not _moves_in_long_runs(blocks, ascending[:7], ascending[:7])


def test_the_tables_follow_the_tensors() -> None:
    """One mover serves pools that come and go."""
    mover = BlockMover()
    for _ in range(6):
        caches = _caches((3, 2, 1, 8), torch.float32, num_layers=2)
        mover.move(caches, caches, torch.tensor([0]), torch.tensor([2]))
        assert all(torch.equal(tensor[2], tensor[0]) for cache in caches for tensor in cache)


def test_blocks_past_two_gigabytes() -> None:
    shape = ((1 << 31) // 4096 + 2, 4096)
    caches = [
        LayerKVCache(untouched_zeros(shape, torch.uint8), untouched_zeros(shape, torch.uint8))
    ]
    caches[0].key[-1] = 7
    last = shape[0] - 1
    BlockMover().move(caches, caches, torch.tensor([last]), torch.tensor([last - 1]))
    assert (caches[0].key[last - 1] == 7).all()
    assert (caches[0].key[0] == 0).all()


def test_blocks_of_two_sizes_are_refused() -> None:
    small, large = _caches((2, 4), torch.float32), _caches((2, 8), torch.float32)
    with pytest.raises(ValueError, match="one size"):
        BlockMover().move(small, large, torch.tensor([0]), torch.tensor([1]))


def test_words_are_as_wide_as_the_addresses_allow() -> None:
    assert move_launch(4096, [0, 512])["WORD_BYTES"] == 8
    assert move_launch(4096, [0, 512])["IS_ALIGNED"]
    assert move_launch(20, [0, 512])["WORD_BYTES"] == 4
    assert not move_launch(24, [0, 512])["IS_ALIGNED"]
    assert move_launch(4096, [0, 514])["WORD_BYTES"] == 2
    assert move_launch(3, [0])["WORD_BYTES"] == 1
