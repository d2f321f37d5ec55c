"""Memory for weights: apart from one another, aligned, and given back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from octavo.kernels import huge_pages
from octavo.kernels.huge_pages import CHUNK, HUGE_PAGE, empty_bytes


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.fixture(autouse=True)
def fresh_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_last", None)
    monkeypatch.setattr(huge_pages, "_end", 0)


def test_tensors_do_not_overlap_and_are_aligned() -> None:
    tensors = [empty_bytes(size) for size in (1, 63, 64, 65, 100_000, 3)]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, number + 1))


def test_a_mapping_begins_at_a_huge_page_and_is_filled_before_the_next() -> None:
    first, second = empty_bytes(HUGE_PAGE - 24), empty_bytes(HUGE_PAGE)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() - first.data_ptr() == HUGE_PAGE
    last = empty_bytes(CHUNK - HUGE_PAGE)  # no room for it behind the others
    assert last.data_ptr() % HUGE_PAGE == 0


def test_more_than_a_chunk_gets_a_mapping_of_its_own() -> None:
    tensor = empty_bytes(CHUNK + 5)
    tensor[-1] = 7
    assert tensor.numel() == CHUNK + 5
    assert tensor[-1] == 7


def test_nothing_is_an_empty_tensor() -> None:
    assert empty_bytes(0).shape == (0,)


def test_a_mapping_goes_with_its_last_tensor() -> None:
    first, second, large = empty_bytes(1000), empty_bytes(1000), empty_bytes(10 * CHUNK)
    mapped = mapped_bytes()
    del large
    gc.collect()
    assert mapped - mapped_bytes() >= 10 * CHUNK
    del first
    gc.collect()
    assert mapped - mapped_bytes() < 11 * CHUNK
    del second
    gc.collect()
    assert mapped - mapped_bytes() >= 11 * CHUNK
    empty_bytes(64).fill_(1)  # finds that its mapping is gone


def test_asks_for_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no huge pages to give")
    tensor = empty_bytes(8 * HUGE_PAGE).fill_(1)
    flags = flags_of(tensor.data_ptr())
    assert "hg" in flags


def flags_of(address: int) -> list[str]:
    """``VmFlags`` of the mapping that holds ``address``."""
    is_within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            is_within = begin <= address < end
        if is_within and fields[0] == "VmFlags:":
            return fields[1:]
    raise LookupError(hex(address))
