"""What this machine, or the cgroup's share of it, has: processors, memory, a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def cgroup_cpus() -> int | None:
    """Whole CPUs of the cgroup v2 quota; ``None`` without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def available_memory_bytes() -> int:
    """Memory that can still be used: the machine's, or what the cgroup's limit leaves if less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text()) - _reclaimable_bytes()
        return available if limit == "max" else max(0, min(available, int(limit) - used))
    except (OSError, ValueError):
        return available


def _reclaimable_bytes() -> int:
    """Page cache that the cgroup's use counts and the kernel gives up when memory is wanted."""
    for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def free_gpu_bytes() -> int | None:
    """Free memory of the first NVIDIA GPU, as its driver's tool tells; ``None`` without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    question = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=20, check=True)
        return int(answer.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def cpu_has_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor computes in bfloat16, by the rule of PyTorch's matrix products."""
    try:
        text = cpu_info.read_text()
    except OSError:
        return False
    flags: set[str] = set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
    wide = {"avx512bw", "avx512vl", "avx512dq"} <= flags
    return wide or {"avx_ne_convert", "avx_vnni_int8"} <= flags or "bf16" in flags
