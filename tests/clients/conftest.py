"""The server under test: the command in ``OCTAVO``, since this environment has no octavo of its own.

``make test-clients`` runs this folder with --confcutdir, so that nothing of octavo is imported here.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Server:
    """Where it listens, and its process."""

    url: str
    process: subprocess.Popen[bytes]

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Return once no request runs or waits."""
        deadline = time.monotonic() + timeout_s
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline, "the server does not become idle"
            time.sleep(0.05)

    def check_nothing_is_held(self) -> None:
        """Every KV block is free or only cached, no sequence is known, no request counted."""
        assert self.metric("octavo:kv_blocks_used") == 0
        assert self.metric("octavo:kv_blocks_free") == self.metric("octavo:kv_blocks_total")
        assert httpx.get(f"{self.url}/load").json() == {"server_load": 0}
        memory = httpx.get(f"{self.url}/debug/kv", timeout=60).json()
        assert memory["sequences"] == []
        assert [block for block in memory["blocks"] if block["ref_count"]] == []


@contextmanager
def serve(octavo: Sequence[str], *flags: str, timeout_s: float = 180) -> Iterator[Server]:
    """Start a server on a free port, wait until it is ready, and end it at last.

    Args:
        octavo: The command.
        flags: What follows ``octavo serve --port``.
        timeout_s: How long it may load.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "GOMP_SPINCOUNT": "1000"}
    process = subprocess.Popen([*octavo, "serve", "--port", str(port), *flags], env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, process, time.monotonic() + timeout_s)
        yield Server(url, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    while True:
        assert process.poll() is None, "the server ended while it was loading"
        assert time.monotonic() < deadline, "the server did not become ready"
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


@pytest.fixture(scope="session")
def octavo() -> list[str]:
    """The command that starts octavo."""
    return shlex.split(os.environ["OCTAVO"])


@pytest.fixture(scope="session")
def start_server(octavo: list[str]) -> Callable[..., Any]:
    """``with start_server(*flags) as server``."""
    return partial(serve, octavo)


API_KEY = "a-key-of-the-tests"


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Any]) -> Iterator[Server]:
    """The embedded model behind a key."""
    flags = ["--max-model-len", "1024", "--api-key", API_KEY, "--check-invariants"]
    flags += ["--served-model-name", "smol", "alias", "--log-level", "warning"]
    with start_server(*flags) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    """What a client of the OpenAI API is configured with."""
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def api_key() -> str:
    """The server's key."""
    return API_KEY


@pytest.fixture(scope="session")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    """The official SDK; retries would hide a wrong status."""
    with openai.OpenAI(base_url=base_url, api_key=API_KEY, max_retries=0, timeout=120) as one:
        yield one


@pytest.fixture(scope="session")
def routes(server: Server) -> set[str]:
    """The paths in the server's OpenAPI document."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    return {*httpx.get(f"{server.url}/openapi.json", headers=headers).json()["paths"]}


@pytest.fixture
def needs_route(request: pytest.FixtureRequest, routes: set[str]) -> None:
    """The route named by the module's ``ROUTE`` is in the server's document."""
    assert request.module.ROUTE in routes
