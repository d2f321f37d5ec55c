"""The front end alone, over an engine that computes nothing, beside the one that is written first.

    python benchmarks/frontend.py --streams 128 --tokens 200

*Chunks per core second* are streamed events divided by the CPU seconds of the server's process, while every step
gives every stream one token. octavo's engine is a process of its own and is not counted, its frames are. The other
servers are FastAPI and pydantic as one writes them first (``front/plain_server.py``): ``plain`` gets its tokens
from an engine process too, one message each; ``plain-own`` makes them on its own loop, which no real engine could
share, and so says what HTTP alone costs. *Loop latency* is the time that ``GET /health``
takes, asked every 10 ms, while 10 prompts of 100,000 characters arrive at once. One JSON line per server and
repeat, in alternation; the last line has the ratios of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pydoc_data.topics
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

HERE = Path(__file__).resolve().parent
SERVERS = {
    "octavo": ("octavo_server.py",),
    "plain": ("plain_server.py",),
    "plain-own": ("plain_server.py", "own"),
}
"""Script, and arguments after port and step."""
HEALTH_EVERY_S = 0.01
NUM_LONG, LONG_CHARS = 10, 100_000


@contextmanager
def running(name: str, step_ms: float) -> Iterator[tuple[int, psutil.Process]]:
    """A server that is ready: its port and its process."""
    port = _free_port()
    script, *more = SERVERS[name]
    command = [sys.executable, "-P", str(HERE / "front" / script), str(port), str(step_ms), *more]
    path = {"PYTHONPATH": f"{HERE.parent}:{HERE / 'front'}"}
    with subprocess.Popen(command, env=psutil.Process().environ() | path) as server:
        try:
            _wait_ready(port, "/ready" if name == "octavo" else "/health", server)
            yield port, psutil.Process(server.pid)
        finally:
            server.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(port: int, path: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit("the server ended before it was ready")


async def stream(port: int, prompt: str | list[int], num_tokens: int, *, model: str = "m") -> int:
    """One streamed completion. Returns the number of its events."""
    fields = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
    num_events, tail = 0, b""
    while data := await reader.read(1 << 16):
        data = tail + data
        num_events += data.count(b"data: ")
        tail = data[-5:]  # an event's beginning may be cut; the five bytes hold no whole one
    writer.close()
    return num_events - 1  # [DONE]


async def throughput(port: int, server: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    """Chunks per CPU second of the server's process."""
    await asyncio.gather(*(stream(port, [5, 7, 9], 8) for _ in range(args.streams)))
    before, begin = server.cpu_times(), time.perf_counter()
    counts = await asyncio.gather(
        *(stream(port, [5 + i, 7, 9, 11] * 8, args.tokens) for i in range(args.streams))
    )
    after, took_s = server.cpu_times(), time.perf_counter() - begin
    if not args.tokens * 0.95 <= min(counts) <= max(counts) <= args.tokens:
        raise SystemExit(f"not one event per token: {sorted(set(counts))}")
    cpu_s = after.user + after.system - before.user - before.system
    return {
        "chunks_per_core_s": round(sum(counts) / cpu_s),
        "user_us": round((after.user - before.user) / sum(counts) * 1e6, 1),
        "system_us": round((after.system - before.system) / sum(counts) * 1e6, 1),
        "chunks_per_s": round(sum(counts) / took_s),
        "cpu_share": round(cpu_s / took_s, 2),
    }


async def latency(port: int) -> dict[str, Any]:
    """How long /health takes while long prompts arrive."""
    text = "\n".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
    prompts = [text[i * 1000 :][:LONG_CHARS] for i in range(NUM_LONG)]
    times_ms: list[float] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        await client.get("/health")
        work = asyncio.gather(*(stream(port, prompt, 1) for prompt in prompts))
        while not work.done():
            begin = time.perf_counter()
            (await client.get("/health")).raise_for_status()
            times_ms.append((time.perf_counter() - begin) * 1000)
            await asyncio.sleep(HEALTH_EVERY_S)
        await work
    return {
        "health_p50_ms": round(statistics.median(times_ms), 1),
        "health_max_ms": round(max(times_ms), 1),
        "num_probes": len(times_ms),
    }


async def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    with running(name, args.step_ms) as (port, server):
        return {"server": name, **await throughput(port, server, args), **await latency(port)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--servers", default=",".join(SERVERS))
    args = parser.parse_args()
    names = args.servers.split(",")
    results: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name in names:
            result = asyncio.run(measure(name, args))
            results[name].append(result["chunks_per_core_s"])
            print(json.dumps(result), flush=True)
    medians = {name: float(statistics.median(values)) for name, values in results.items()}
    if own := medians.pop("octavo", 0):
        ratios = {f"beside {name}": round(own / value, 2) for name, value in medians.items()}
        print(json.dumps(ratios))


if __name__ == "__main__":
    main()
