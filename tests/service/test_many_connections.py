"""A thousand streams at once: all are answered, and memory does not grow with what has passed."""

from __future__ import annotations

import asyncio
import importlib.util
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

NUM_CONNECTIONS = 1000
NUM_TOKENS = 16
USUAL_FILES = 1024


@pytest.fixture(scope="module")
def connections() -> Any:
    """``benchmarks/connections.py``, which is no part of the package."""
    path = Path(__file__).parents[2] / "benchmarks" / "connections.py"
    spec = importlib.util.spec_from_file_location("connections", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def few_files() -> Iterator[None]:
    """The limit that most shells and service managers give; this process itself needs more, afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * NUM_CONNECTIONS:
        pytest.skip(f"may not open more than {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_FILES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_streams_are_all_answered_in_bounded_memory(
    connections: Any, few_files: None, start_server: Callable[..., Any], tiny_model: Path
) -> None:
    flags = ("--num-gpu-blocks-override", "256", "--max-num-seqs", "64", "--log-level", "warning")
    with start_server(str(tiny_model), *flags) as server:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        front_end = psutil.Process(server.process.pid)
        assert front_end.rlimit(psutil.RLIMIT_NOFILE)[0] == hard  # it has helped itself
        num_fds = front_end.num_fds()
        memory = []
        for _ in range(3):
            asked = connections.ask(server.url, NUM_CONNECTIONS, NUM_TOKENS)
            assert asyncio.run(asked) == NUM_CONNECTIONS * NUM_TOKENS
            server.wait_idle()
            memory.append(connections.memory(front_end))
        assert server.metric("vllm:request_success_total") == 3 * NUM_CONNECTIONS
        assert memory[-1]["front_end"] < memory[0]["front_end"] + 32  # MiB, for 2000 more streams
        assert memory[-1]["engine"] < memory[0]["engine"] + 32
        assert front_end.num_fds() < num_fds + 20
