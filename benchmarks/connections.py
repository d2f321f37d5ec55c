"""Many streaming connections at once to a model that is nearly free: are all answered, in how much memory?

    python benchmarks/connections.py [--connections 1000] [--tokens 64] [--rounds 3] [--output FILE]

Starts ``octavo serve`` with a random model of two small layers and 64 seats, opens all connections, and only then asks
on each. Meanwhile another process asks ``GET /health`` every 20 ms. One JSON line a round: tokens a second, the times of
``/health``, and the resident memory of front end and engine before the first round and after each. The client runs on the
same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))

PROBE_EVERY_S = 0.02
SEATS = 64


async def ask(url: str, num_connections: int, num_tokens: int) -> int:
    """Stream on that many connections, all of them open before the first request. Returns the tokens that came."""
    host, port = url.removeprefix("http://").split(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(num_connections)]
    asked = (_stream(*pair, number, num_tokens) for number, pair in enumerate(opened))
    return sum(await asyncio.gather(*asked))


async def _stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, num_tokens: int
) -> int:
    body = {
        "prompt": [number % 250 + 1, number // 250 + 1, 7, 9],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    received = await reader.read(-1)
    writer.close()
    return _check(received)


def _check(received: bytes) -> int:
    """The tokens of a stream that was complete."""
    if not received.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in received[-60:]:
        raise RuntimeError(f"no complete answer: {received[:200]!r} ... {received[-200:]!r}")
    lines = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    usage = json.loads(lines[-1].removeprefix(b"data: ").rstrip())["usage"]
    return int(usage["completion_tokens"])


def memory(server: psutil.Process) -> dict[str, float]:
    """Resident MiB of the server's processes."""
    family = {"front_end": server, "engine": server.children()[0]}
    return {name: round(one.memory_info().rss / 2**20, 1) for name, one in family.items()}


def probe(url: str, is_over: Event, times: Any) -> None:
    """Ask ``/health`` until it is over; put the times, in ms, into the queue ``times``, and how late own sleeps ended."""
    taken, late = list[float](), list[float]()
    while not is_over.is_set():
        begin = time.perf_counter()
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            answer.read()
        end = time.perf_counter()
        taken.append((end - begin) * 1000)
        time.sleep(PROBE_EVERY_S)
        late.append((time.perf_counter() - end - PROBE_EVERY_S) * 1000)
    times.put((taken, late))


@contextmanager
def probing(url: str) -> Iterator[tuple[list[float], list[float]]]:
    """Fills the lists, at the end, with the times of ``/health`` meanwhile, and with how late the prober's sleeps ended."""
    context = multiprocessing.get_context("spawn")
    is_over, queue = context.Event(), context.Queue()
    process = context.Process(target=probe, args=(url, is_over, queue))
    process.start()
    times, late = list[float](), list[float]()
    yield times, late
    is_over.set()
    for seen, told in zip((times, late), queue.get(timeout=60), strict=True):
        seen += told
    process.join(30)


def measure(url: str, server: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    with probing(url) as (times, late):
        time.sleep(1)  # the prober starts
        begin = time.perf_counter()
        num_tokens = asyncio.run(ask(url, args.connections, args.tokens))
        took_s = time.perf_counter() - begin
    if num_tokens != args.connections * args.tokens:
        raise RuntimeError(f"{num_tokens} tokens came")
    return {
        "connections": args.connections,
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / took_s),
        "health_p50_ms": round(statistics.median(times), 1),
        "health_p99_ms": round(statistics.quantiles(times, n=100)[98], 1),
        "health_max_ms": round(max(times), 1),
        "num_probes": len(times),
        "prober_late_max_ms": round(max(late), 1),  # what the machine lets a process wait for
        "resident_mib": memory(server),
    }


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    import torch
    from model_shapes import SHAPES
    from random_model import write_model

    write_model(folder, SHAPES["tiny"], torch.float32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "octavo", "serve", str(folder), "--port", str(port)]
    command += ["--dtype", "float32", "--max-num-seqs", str(SEATS), "--log-level", "warning"]
    process = subprocess.Popen([*command, "--kv-cache-memory-bytes", "64MiB"])
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise RuntimeError("the server ended")
            time.sleep(0.1)
        yield url, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (url, server):
        asyncio.run(ask(url, 8, 8))
        lines: list[dict[str, Any]] = [{"resident_mib": memory(server)}]
        for _ in range(args.rounds):
            lines.append(measure(url, server, args))
            time.sleep(1)
    for line in lines:
        print(json.dumps(line), flush=True)
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
