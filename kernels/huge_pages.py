"""Memory for weights in huge pages, where the system has them.

A step reads every weight once, so its addresses miss the processor's translation cache at each small page; on a
virtual machine a miss walks two page tables.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 64 << 20  # bytes of a mapping; only the pages that are written take memory
_ALIGNMENT = 64

_lock = threading.Lock()
# The mapping that still has room, if a tensor lives in it, and the end of what is taken of it.
_last: weakref.ref[mmap.mmap] | None = None
_end = 0


def empty_bytes(size: int) -> Tensor:
    """``[size]`` uint8, not initialised, aligned to 64 bytes. Its mapping goes with the last tensor in it.

    What one tensor gives back is not taken by another: for what stays.
    """
    global _last, _end
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    if size > CHUNK - HUGE_PAGE:
        own = _map(size + HUGE_PAGE)
        return _part(own, _first_huge_page(own), size)
    with _lock:
        mapping = _last() if _last is not None else None
        begin = -(-_end // _ALIGNMENT) * _ALIGNMENT
        if mapping is None or begin + size > len(mapping):
            mapping = _map(CHUNK)
            _last, begin = weakref.ref(mapping), _first_huge_page(mapping)
        _end = begin + size
    return _part(mapping, begin, size)


def _part(mapping: mmap.mmap, begin: int, size: int) -> Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=begin, count=size)


def _map(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _first_huge_page(mapping: mmap.mmap) -> int:
    return -_part(mapping, 0, 1).data_ptr() % HUGE_PAGE
