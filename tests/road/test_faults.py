"""Faults under a server with the embedded model: requests, clients, files and processes that go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

POISON = 31_337
POISONED_ENGINE = f"""
import os, signal, sys

if sys.orig_argv[-1] == "octavo.engine.build":
    from octavo.engine.execution.runner import ModelRunner

    submit, poisoned = ModelRunner.submit, set()

    def deadly_submit(self, plan):
        poisoned.update(new.seq_id for new in plan.new_rows if {POISON} in new.prompt_token_ids)
        if poisoned.intersection(row.seq_id for row in plan.rows):
            os.kill(os.getpid(), signal.SIGKILL)
        return submit(self, plan)

    ModelRunner.submit = deadly_submit
"""
BYSTANDERS: list[dict[str, Any]] = [
    {"prompt": f"{number} birds", "seed": number, "max_tokens": 48, "ignore_eos": True}
    for number in range(6)
]


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Its engine dies of a step with the token POISON, as of a fault in a kernel."""
    folder = tmp_path_factory.mktemp("poison")
    (folder / "sitecustomize.py").write_text(POISONED_ENGINE)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        flags = ("--check-invariants", "--client-stall-timeout", "2", "--max-logprobs", "20")
        with start_server(*flags, "--enable-debug-endpoints") as running:
            yield running


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=300) as client:
        posts = (client.post(f"{url}/v1/completions", json=body) for body in bodies)
        return await asyncio.gather(*posts)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what is waited for does not happen"
        time.sleep(0.05)


def assert_nothing_is_left(server: Any) -> None:
    server.wait_idle(60)
    wait_until(lambda: bool(httpx.get(f"{server.url}/load").json() == {"server_load": 0}))
    kv = httpx.get(f"{server.url}/debug/kv").json()
    assert kv["sequences"] == []
    assert not any(block["ref_count"] for block in kv["blocks"])


def test_a_request_that_kills_engines_is_the_only_one_with_an_error(server: Any) -> None:
    poison = {"prompt": [100, POISON, 200], "max_tokens": 8}
    undisturbed = asyncio.run(ask_all(server.url, BYSTANDERS))
    *disturbed, poisoned = asyncio.run(ask_all(server.url, [*BYSTANDERS, poison]))
    for answer, twin in zip(disturbed, undisturbed, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == twin.json()["choices"]
    assert poisoned.status_code == 500
    assert poisoned.json()["error"]["code"] == "generation_failed"
    assert server.metric("octavo:engine_restarts_total") >= 2
    assert ask(server.url, **BYSTANDERS[0]).json()["choices"] == undisturbed[0].json()["choices"]
    assert_nothing_is_left(server)


# Clients.


def connect(server: Any, body: dict[str, Any], *, length: int | None = None) -> socket.socket:
    """A connection on which the head of a request has been sent, and its body unless ``length`` says otherwise."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    host, port = server.url.removeprefix("http://").split(":")
    connection.settimeout(60)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
    connection.sendall(head.encode() + (content if length is None else b""))
    return connection


LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def test_clients_that_vanish_leave_nothing(server: Any) -> None:
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    for has_begun in (False, True):
        connections = [connect(server, {**LONG, "seed": number}) for number in range(4)]
        if has_begun:
            for connection in connections:
                assert b"data: {" in connection.recv(65536) + connection.recv(65536)
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()  # with a reset
    wait_until(
        lambda: server.metric("vllm:request_success_total", finished_reason="abort") >= before + 4
    )
    assert_nothing_is_left(server)


def test_a_client_that_trickles_is_cut_off(server: Any) -> None:
    with connect(server, {}, length=100_000) as connection:
        connection.settimeout(0.2)
        received = b""
        deadline = time.monotonic() + 60
        while b"\r\n\r\n" not in received:
            assert time.monotonic() < deadline, "it goes on"
            connection.sendall(b" ")
            try:
                received += connection.recv(4096)
            except TimeoutError:
                continue
    assert received.startswith(b"HTTP/1.1 408 ")
    assert_nothing_is_left(server)


def test_a_client_that_never_reads_is_cut_off_and_delays_nobody(server: Any) -> None:
    """Its answer is larger than what the connection holds."""
    small = ask(server.url, prompt="Water boils at", max_tokens=4, temperature=0).json()["choices"]
    large = {"prompt": "one two three " * 150, "max_tokens": 2, "n": 64, "echo": True}
    whole = httpx.post(f"{server.url}/v1/completions", json={**large, "logprobs": 20}, timeout=300)
    assert whole.status_code == 200
    assert len(whole.content) > 8 << 20
    with connect(server, {**large, "logprobs": 20}):
        wait_until(lambda: bool(httpx.get(f"{server.url}/load").json()["server_load"] == 1))
        again = ask(server.url, prompt="Water boils at", max_tokens=4, temperature=0)
        assert again.json()["choices"] == small
        assert_nothing_is_left(server)  # while it is still connected


# Processes. The server of this module ends here.


def test_the_engine_is_gone_within_two_seconds_of_its_front_end(server: Any) -> None:
    (engine,) = psutil.Process(server.process.pid).children()
    with connect(server, LONG) as connection:
        assert b"data: {" in connection.recv(65536) + connection.recv(65536)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not engine.is_running(), 2)


@contextmanager
def starting(
    *flags: str, under: Sequence[str] = (), **environ: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that may never be ready, and its address. ``under``: the command that becomes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    process = subprocess.Popen(
        [
            *under,
            sys.executable,
            "-P",
            "-m",
            "octavo",
            "serve",
            "--port",
            port,
            "--stats-interval",
            "0",
            *flags,
        ],
        env={**os.environ, **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_ready(process: subprocess.Popen[str], url: str) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, "the server ended while it was loading"
        try:
            return httpx.get(f"{url}/ready", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(is_ready, 180)


def test_a_model_file_that_is_cut_short_is_refused_also_by_the_next_engine(
    model_path: Path, tmp_path: Path
) -> None:
    model = tmp_path / "smol.gguf"
    shutil.copy(model_path, model)
    whole = model.stat().st_size
    with starting(str(model), "--max-engine-restarts", "1") as (process, url):
        wait_ready(process, url)
        os.truncate(model, whole - 4096)
        assert ask(url, prompt="Water boils at", max_tokens=4).status_code == 200
        (engine,) = psutil.Process(process.pid).children()
        engine.kill()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1  # it might have been mended meanwhile, so it is tried again
    assert "smol.gguf" in said.splitlines()[-1]
    assert "Traceback" not in said
    with starting(str(model)) as (process, _):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 2
    assert "smol.gguf" in said
    assert said.count("\n") == 1


def test_a_full_disk_costs_the_native_kernels_and_nothing_else(tmp_path: Path) -> None:
    """Nowhere is room to compile them: the next best kernels compute, and the log says why."""
    full = tmp_path / "full"
    full.mkdir()
    script = f'mount -t tmpfs -o size=128k tmpfs {full} && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs a namespace in which a user may mount")
    folders = {"HOME": str(full), "XDG_CACHE_HOME": str(full), "TMPDIR": str(full)}
    with starting(under=command, **folders) as (process, url):
        wait_ready(process, url)
        answer = ask(url, prompt="The capital of France is", max_tokens=5, temperature=0)
        assert answer.status_code == 200
        assert "Paris" in answer.json()["choices"][0]["text"]
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
    assert "No space left on device" in said
    assert "Traceback" not in said
