"""How this process's allocator treats the large buffers that every step frees and wants again."""

from __future__ import annotations

import ctypes
import ctypes.util

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let glibc keep freed buffers up to 1 GiB instead of returning them to the kernel.

    Activations and logits are megabytes, freed at the end of a step and asked for in the next; giving
    them back costs a page fault per 4 KiB each time. Applies to the whole process.

    Returns:
        Whether the allocator took it; ``False`` where it is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))
