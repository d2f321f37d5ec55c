"""Two instances with the embedded model behind nginx are restarted one after the other, under load: no request fails."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DRAIN_DELAY_S = 5
NUM_CLIENTS = 6
PROMPTS = ("Water boils at", "The capital of France is", "def fibonacci(n):", "1, 2, 3, 4, 5,")
BODY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Instance:
    """A server on a port that it keeps through its restarts."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        port = self.address.rpartition(":")[2]
        flags = ["--drain-delay", str(DRAIN_DELAY_S), "--shutdown-timeout", "120"]
        command = [sys.executable, "-P", "-m", "octavo", "serve", "--port", port, *flags]
        self.process = subprocess.Popen(command)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> int:
        """SIGTERM. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(180)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Proxy:
    """nginx with the shipped configuration, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._members: list[str] = []
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        shipped = (ROOT / "deploy" / "nginx" / "octavo.conf").read_text()
        assert shipped.count("listen 8080;") == 1
        text = shipped.replace("listen 8080;", f"listen 127.0.0.1:{port};")
        (folder / "octavo.conf").write_text(text)
        (folder / "nginx.conf").write_text(self._frame())

    def _frame(self) -> str:
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = " ".join(f"{kind}_temp_path {self._folder}/{kind};" for kind in kinds)
        return (
            f"{'user root;' if os.geteuid() == 0 else ''} worker_processes 1; daemon off;"
            f" pid {self._folder}/nginx.pid; error_log {self._folder}/error.log;\n"
            f"events {{}}\nhttp {{ access_log off; {temporary} include octavo.conf; }}\n"
        )

    def _command(self, *more: str) -> list[str]:
        binary = shutil.which("nginx") or "/usr/sbin/nginx"
        return [binary, "-p", str(self._folder), "-c", "nginx.conf", "-e", "start.log", *more]

    def show(self, members: list[str]) -> None:
        """These instances get requests from now on."""
        if members == self._members:
            return
        lines = "".join(f"server {member};\n" for member in members)
        (self._folder / "octavo-instances.conf").write_text(lines)
        if self._members:
            subprocess.run(self._command("-s", "reload"), check=True)
        self._members = members

    @contextmanager
    def running(self) -> Iterator[None]:
        process = subprocess.Popen(self._command())
        try:
            deadline = time.monotonic() + 30
            while not self._answers():
                assert process.poll() is None, (self._folder / "start.log").read_text()
                assert time.monotonic() < deadline, "nginx does not answer"
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(20)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def proxy(tmp_path: Path) -> Proxy:
    if shutil.which("nginx") is None and not Path("/usr/sbin/nginx").exists():
        reason = "needs nginx; .ci/run says which package has it"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return Proxy(tmp_path)


@pytest.fixture
def instances() -> Iterator[list[Instance]]:
    both = [Instance(), Instance()]
    try:
        yield both
    finally:
        for one in both:
            one.kill()


async def watch(instances: list[Instance], proxy: Proxy) -> None:
    """What an orchestrator does: only ready instances get requests."""
    while True:
        ready = [one.address for one in instances if await asyncio.to_thread(one.is_ready)]
        if ready:
            await asyncio.to_thread(proxy.show, ready)
        await asyncio.sleep(0.2)


class Load:
    """Clients that ask, streamed and whole by turns, until they are told to stop."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self.is_over = False
        self.num_answers = 0
        self.failures: list[str] = []
        self.texts: dict[str, Counter[str]] = {prompt: Counter() for prompt in PROMPTS}

    async def run(self) -> None:
        # A connection for each request: a reload closes idle ones, and whoever sends just then has to send again.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            await asyncio.gather(*(self._ask_on(client, number) for number in range(NUM_CLIENTS)))

    async def _ask_on(self, client: httpx.AsyncClient, number: int) -> None:
        while not self.is_over:
            prompt = PROMPTS[number % len(PROMPTS)]
            ask = self._streamed if number % 2 else self._whole
            try:
                self.texts[prompt][await ask(client, {**BODY, "prompt": prompt})] += 1
            except Exception as error:  # noqa: BLE001 every kind of failure counts
                self.failures.append(repr(error))
            self.num_answers += 1
            number += 1

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await client.post(self._url, json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length"
        return str(choice["text"])

    async def _streamed(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:

        async with client.stream("POST", self._url, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["length"]
        return "".join(chunk["text"] for chunk in chunks)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.1)


def test_no_request_fails_while_one_instance_after_the_other_is_restarted(
    proxy: Proxy, instances: list[Instance]
) -> None:
    async def scene() -> Load:
        await until(lambda: all(one.is_ready() for one in instances))
        proxy.show([one.address for one in instances])
        load = Load(proxy.url)
        with proxy.running():
            watching = asyncio.create_task(watch(instances, proxy))
            asking = asyncio.create_task(load.run())
            for instance in instances:
                await served_more(load)
                assert await asyncio.to_thread(instance.end) == 0
                instance.start()
                await until(instance.is_ready)
            await served_more(load)
            load.is_over = True
            await asking
            watching.cancel()
        return load

    load = asyncio.run(scene())
    assert load.failures == []
    assert load.num_answers >= 6 * NUM_CLIENTS
    assert [len(texts) for texts in load.texts.values()] == [1] * len(PROMPTS)
    for instance in instances:  # both have computed since their restart
        text = httpx.get(f"http://{instance.address}/metrics").text
        (line,) = (x for x in text.splitlines() if x.startswith("vllm:generation_tokens_total{"))
        assert float(line.rpartition(" ")[2]) > 0


async def served_more(load: Load) -> None:
    """Return when every client has had two more answers, in the mean."""
    wanted = load.num_answers + 2 * NUM_CLIENTS
    await until(lambda: load.num_answers >= wanted)
