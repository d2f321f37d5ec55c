"""The environment's variables, which are read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .engine_config import EngineConfig
from .machine import cgroup_cpus
from .server_config import ServerConfig


def resolve_server(config: ServerConfig, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Fill what the environment provides."""
    environ = os.environ if environ is None else environ
    if config.api_key is None and environ.get("OCTAVO_API_KEY"):
        return replace(config, api_key=(environ["OCTAVO_API_KEY"],))
    return config


def num_cpu_threads(environ: Mapping[str, str] | None = None) -> int:
    """Compute threads: OMP_NUM_THREADS, else the CPUs that affinity and the cgroup quota leave."""
    environ = os.environ if environ is None else environ
    if environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(environ["OMP_NUM_THREADS"]))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, cgroup_cpus() or cpus))


def engine_environment(
    config: EngineConfig, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The engine process's environment.

    OpenMP's threads go to sleep some 50 microseconds after a step instead of milliseconds: whoever sends the
    tokens needs their cores. Not with the kernels in PyTorch, which begin and end with every op.
    """
    environ = os.environ if environ is None else environ
    is_chosen = "GOMP_SPINCOUNT" in environ or "OMP_WAIT_POLICY" in environ
    if is_chosen or config.execution.attention_backend == "torch":
        return dict(environ)
    return {**environ, "GOMP_SPINCOUNT": "1000"}


def kernel_cache_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where compiled kernels are kept: in XDG_CACHE_HOME; ``None`` leaves it to the user's home."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_CACHE_HOME")
    return Path(home) / "octavo" / "kernels" if home and os.path.isabs(home) else None
