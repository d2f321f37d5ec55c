"""Numbers on their way to a device and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.engine.execution.transfer import Transfer, to_device

ARRAYS: list[NDArray[Any]] = [
    np.arange(5, dtype=np.int64),
    np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32),
    np.array([0.5, -1.0, 3.0], dtype=np.float32),
    np.zeros(0, dtype=np.int64),
    np.arange(12, dtype=np.int64).reshape(3, 4).T,
]


def _asynchronous() -> Transfer:
    transfer = Transfer(torch.device("cpu"))
    transfer.is_asynchronous = True
    return transfer


@pytest.mark.parametrize("transfer", [Transfer(torch.device("cpu")), _asynchronous()])
def test_arrays_arrive_as_they_are(transfer: Transfer) -> None:
    for array, tensor in zip(ARRAYS, transfer.upload(*ARRAYS), strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


@pytest.mark.parametrize("transfer", [Transfer(torch.device("cpu")), _asynchronous()])
def test_columns_come_back_one_by_one(transfer: Transfer) -> None:
    ids, flags = torch.tensor([7, 8, 2**40]), torch.tensor([True, False])
    assert transfer.download(ids, flags) == [[7, 8, 2**40], [1, 0]]
    assert transfer.download(ids, ids[:0], flags) == [[7, 8, 2**40], [], [1, 0]]


def test_one_copy_carries_all() -> None:
    first, *others = _asynchronous().upload(*ARRAYS)
    storage = first.untyped_storage().data_ptr()
    assert all(tensor.untyped_storage().data_ptr() == storage for tensor in others)


def test_numbers_to_a_device() -> None:
    assert to_device([3, 1], torch.device("cpu")).tolist() == [3, 1]
    assert to_device(ARRAYS[2], torch.device("cpu")).tolist() == [0.5, -1.0, 3.0]


@pytest.mark.gpu
def test_uploads_to_a_gpu_are_only_enqueued() -> None:
    cuda = torch.device("cuda")
    transfer = Transfer(cuda)
    transfer.upload(*ARRAYS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tensors = transfer.upload(*ARRAYS)
        single = to_device([3, 1], cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
    assert single.tolist() == [3, 1]
