"""Start, drain, death and end of the server, around a fake engine."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from octavo.engine.api import Engine, LoadProgress
from octavo.engine.config.server_config import ServerConfig
from octavo.engine.errors import ConfigError, EngineNotReadyError
from octavo.engine.stats import EngineStats
from octavo.server import banner
from octavo.server.banner import Console, base_url, curl_line
from octavo.server.launch import model_names, serve
from octavo.server.listening import bind

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

PROMPT = {"prompt": "a", "stream": True}
BAD = {"prompt": 1}


class Running:
    """A server in this process: its task, its words, a client."""

    def __init__(self, task: asyncio.Task[int], out: io.StringIO, client: httpx.AsyncClient):
        self.task, self.out, self.client = task, out, client

    async def exit_code(self) -> int:
        async with asyncio.timeout(8):
            return await self.task


@asynccontextmanager
async def running(engine: Engine, **options: Any) -> AsyncIterator[Running]:
    out = io.StringIO()
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = ServerConfig(**options)
    task = asyncio.create_task(serve(engine, listener, config, ("tiny",), Console(out)))
    try:
        async with httpx.AsyncClient(base_url=url) as client:
            await client.get("/health")
            yield Running(task, out, client)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} on 127.0.0.1 .*in use.*--port"):
            bind("127.0.0.1", port)


def test_hosts() -> None:
    with pytest.raises(ConfigError, match=r"--host nowhere\.invalid"):
        bind("nowhere.invalid", 0)
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with bind("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_urls(host: str, expected: str) -> None:
    assert base_url(host, 80) == expected


@pytest.mark.parametrize(
    ("model", "configured", "expected"),
    [
        (None, None, ("SmolLM2-135M-Instruct",)),
        ("/models/Llama-3/", None, ("Llama-3",)),
        ("/models/x.Q4_1.gguf", None, ("x.Q4_1",)),
        ("/models/x", ("a", "b"), ("a", "b")),
        ("org/Name", None, ("org/Name",)),
        ("org/Name:Q4_K_M", None, ("org/Name:Q4_K_M",)),
        ("org/Name", ("a",), ("a",)),
    ],
)
def test_model_names(model: str | None, configured: Any, expected: tuple[str, ...]) -> None:
    assert model_names(model, ServerConfig(served_model_name=configured)) == expected


@pytest.mark.parametrize("path", ["/models/a\nb", "/models/a\x1b[2J.gguf", "/models/a\u2028b"])
def test_a_name_that_would_forge_lines_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"'a\\.*; give --served-model-name"):
        model_names(path, ServerConfig())
    assert model_names(path, ServerConfig(served_model_name=("a",))) == ("a",)


def test_paths_stay_on_the_lines_that_the_banner_has_for_them(engine: FakeEngine) -> None:
    lines = banner.banner(engine.info, "a", "unix:/run/a\nocta", needs_key=False).splitlines()
    assert r"  URL               unix:/run/a\nocta" in lines


def test_curl_line_is_safe_to_paste() -> None:
    line = curl_line("it's", "http://x", needs_key=True)
    assert "$OCTAVO_API_KEY" in line
    assert "it'\\''s" in line


class Downloading:
    """An engine whose progress is another one each time it is looked at, until it is ready."""

    def __init__(self, *progress: LoadProgress) -> None:
        self._left = list(progress)

    def check_ready(self) -> None:
        if self._left:
            raise EngineNotReadyError("not yet")

    @property
    def progress(self) -> LoadProgress:
        return self._left.pop(0)


@pytest.mark.anyio
async def test_a_download_is_told_in_tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banner, "POLL_S", 0)
    shares = [LoadProgress("downloading", share / 100) for share in range(0, 26, 5)]
    out = io.StringIO()
    engine = cast(Engine, Downloading(*shares, LoadProgress("loading", 0.0)))
    await banner.watch_progress(engine, Console(out))
    assert [line.removeprefix("octavo: ") for line in out.getvalue().splitlines()] == [
        *("downloading", "downloading 10%", "downloading 20%", "loading")
    ]


@pytest.mark.anyio
async def test_answers_while_loading_then_says_what_is_served(engine: FakeEngine) -> None:
    engine.is_ready = False
    async with running(engine, api_key=("hunter2",)) as server:
        assert (await server.client.get("/ready")).status_code == 503
        headers = {"Authorization": "Bearer hunter2"}
        answer = await server.client.post("/v1/completions", json=PROMPT, headers=headers)
        assert answer.status_code == 503
        engine.is_ready = True
        assert (await server.client.get("/ready")).status_code == 200
        async with asyncio.timeout(5):
            while "curl" not in server.out.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        text = server.out.getvalue()
        for part in (
            *("octavo: loading\n", "LlamaForCausalLM", "135 million", "float32", "torch kernels"),
            *("10 blocks x 16 tokens = 160 tokens (0.00 GiB)", str(server.client.base_url)[:-1]),
        ):
            assert part in text
        assert "hunter2" not in text
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.exit_code() == 0
    assert engine.is_closed


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_live_streams_with_abort(engine: FakeEngine, number: int) -> None:
    engine.hold_at = 2
    async with running(engine) as server:
        async with server.client.stream("POST", "/v1/completions", json=PROMPT) as answer:
            lines = answer.aiter_lines()
            assert "Hel" in await anext(lines)
            os.kill(os.getpid(), number)
            rest = [line async for line in lines if line]
        assert '"finish_reason":"abort"' in rest[0]
        assert rest[-1] == "data: [DONE]"
        assert await server.exit_code() == 0


@pytest.mark.anyio
async def test_running_requests_get_their_time(engine: FakeEngine) -> None:
    engine.hold_at = 2
    async with running(engine, shutdown_timeout=60.0) as server:
        async with server.client.stream("POST", "/v1/completions", json=PROMPT) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
            refused = await server.client.post("/v1/completions", json=PROMPT)
            assert refused.status_code == 503
            assert not engine.is_closed
            engine.released.set()
            rest = [line async for line in lines if line]
        assert '"finish_reason":"stop"' in rest[-2]
        assert await server.exit_code() == 0


@pytest.mark.anyio
@pytest.mark.parametrize("is_restarting", [False, True])
async def test_requests_are_taken_during_the_delay_though_not_ready(
    engine: FakeEngine, is_restarting: bool
) -> None:
    async with running(engine, drain_delay=3600.0, shutdown_timeout=60.0) as server:
        engine.is_restarting = is_restarting
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        assert (await server.client.get("/ready")).json()["status"] == "stopping"
        assert (await server.client.get("/health")).status_code == 200
        answer = await server.client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert not server.task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.exit_code() == 0


@pytest.mark.anyio
async def test_after_the_delay_requests_are_refused_and_running_ones_end(
    engine: FakeEngine,
) -> None:
    engine.hold_at = 2
    async with running(engine, drain_delay=0.1, shutdown_timeout=60.0) as server:
        async with server.client.stream("POST", "/v1/completions", json=PROMPT) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(10):
                while (await server.client.post("/v1/completions", json=BAD)).status_code == 400:
                    pass
            refused = await server.client.post("/v1/completions", json=PROMPT)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert not server.task.done()
            engine.released.set()
            rest = [line async for line in lines if line]
        assert '"finish_reason":"stop"' in rest[-2]
        assert await server.exit_code() == 0


@pytest.mark.anyio
async def test_ctrl_c_has_no_delay(engine: FakeEngine) -> None:
    async with running(engine, drain_delay=3600.0) as server:
        os.kill(os.getpid(), signal.SIGINT)
        assert await server.exit_code() == 0


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{"drain_delay": 3600.0}, {"shutdown_timeout": 60.0}])
async def test_a_second_signal_waits_for_nothing(
    engine: FakeEngine, options: dict[str, float]
) -> None:
    engine.hold_at = 2
    async with running(engine, **options) as server:
        async with server.client.stream("POST", "/v1/completions", json=PROMPT) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
            rest = [line async for line in lines if line]
        assert '"finish_reason":"abort"' in rest[0]
        assert await server.exit_code() == 0


@pytest.mark.anyio
async def test_engine_death_is_one_line_and_a_failure(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.hold_at = 2
    async with running(engine) as server:
        assert engine.sink is not None
        engine.sink.record_stats(EngineStats(num_steps=7))
        async with server.client.stream("POST", "/v1/completions", json=PROMPT) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            engine.die("The engine process was killed by signal 9.")
            rest = [line async for line in lines if line]
            assert "engine_dead" in rest[0]
            assert rest[-1] == "data: [DONE]"
        assert (await server.client.get("/health")).status_code == 503
        assert (await server.client.post("/v1/completions", json=PROMPT)).status_code == 503
        assert await server.exit_code() == 1
    assert '"step":7' in caplog.text  # of the flight recorder
    last = server.out.getvalue().splitlines()[-1]
    assert last == "octavo: The engine process was killed by signal 9."


@pytest.mark.slow
def test_process_reports_a_port_in_use_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-P", "-m", "octavo", "serve", "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    assert ended.returncode != 0
    assert port in ended.stderr
    assert ended.stderr.count("\n") == 1
