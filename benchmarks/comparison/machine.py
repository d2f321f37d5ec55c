"""What a result was measured on, and what else the machine did meanwhile: without it, a figure says nothing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from octavo import __version__

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


def describe() -> dict[str, Any]:
    info = cpu_info(Path("/proc/cpuinfo").read_text())
    return {
        "cpu": info["name"],
        "flags": [flag for flag in _FLAGS if flag in info["flags"]],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "octavo": __version__,
    }


def cpu_info(text: str) -> dict[str, Any]:
    """Name and flags of the first processor of ``/proc/cpuinfo``. A virtual machine may hide the name's number."""
    fields = {}
    for line in text.splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", "unknown")
    if "family" not in name and "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return {"name": name, "flags": fields.get("flags", fields.get("Features", "")).split()}


class Neighbours:
    """The share of the machine's CPU time that was not used by this process and the ``engine``'s processes.

    A few percent belong to the system. More, and a figure measured meanwhile is too low.
    """

    def __init__(self, engine: Sequence[psutil.Process]) -> None:
        self._mine = (psutil.Process(), *engine)
        self._begin = time.monotonic(), _busy_seconds(), _seconds_of(self._mine)

    def share(self) -> float:
        begin, busy, mine = self._begin
        others = (_busy_seconds() - busy) - (_seconds_of(self._mine) - mine)
        cores = psutil.cpu_count() or 1
        return max(0.0, others / ((time.monotonic() - begin) * cores))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _seconds_of(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (p.cpu_times() for p in processes))
