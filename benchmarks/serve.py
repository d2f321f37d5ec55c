"""Drive any OpenAI-compatible server with workloads A to E, streaming over HTTP.

| | work | concurrency | figure |
|---|---|---|---|
| A | 32 requests, 128 tokens in, 128 out | 32 | output tokens/s |
| B | 1 request, 128 in, 128 out | 1 | TTFT, decode tokens/s |
| C | 32 requests sharing 512 tokens, 32 own, 64 out | 32 | seconds |
| D | 8 requests, 1024 in, 1 out | 8 | prefill tokens/s |
| E | 64 requests, 100-300 in, 64 out | 16 | requests/s, TTFT and ITL |

The text is Python's own documentation, cut at random but seeded places. ``repeat`` gives equal sizes
with other text, so that no cache of an earlier run is warm.

    octavo serve --port 8000 &
    python benchmarks/serve.py --base-url http://127.0.0.1:8000 --work A,B --repeats 3
    python benchmarks/serve.py --start "octavo serve --port {port}" --work A,B,D,E

One JSON line per workload and repeat; ``--output FILE`` appends them. With ``--start`` the server is
started on a free port and ended afterwards, and the time from process start to the first token and the
memory of all its processes (PSS) are measured too. The client runs on the same cores as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pydoc_data.topics
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from octavo.engine.checkpoint.checkpoint import find_embedded_model, open_checkpoint
from octavo.engine.text.tokenizer import Tokenizer, load_tokenizer

CONCURRENCY = {"A": 32, "B": 1, "C": 32, "D": 8, "E": 16, "W": 4}


class Work(NamedTuple):
    """One request: prompt ids and the exact number of tokens to generate."""

    prompt: list[int]
    num_output_tokens: int


def corpus(tokenizer: Tokenizer) -> list[int]:
    text = "\n\n".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
    special = tokenizer.special_token_ids
    return [i for i in tokenizer.encode(text, add_special_tokens=False) if i not in special]


def workload(name: str, repeat: int, ids: list[int]) -> list[Work]:
    """The requests of workload ``name``; ``W`` is a short warm-up."""
    rng = random.Random(f"{name}{repeat}")

    def window(length: int) -> list[int]:
        begin = rng.randrange(len(ids) - length)
        return ids[begin : begin + length]

    if name == "A":
        return [Work(window(128), 128) for _ in range(32)]
    if name == "B":
        return [Work(window(128), 128)]
    if name == "C":
        shared = window(512)
        return [Work(shared + window(32), 64) for _ in range(32)]
    if name == "D":
        return [Work(window(1024), 1) for _ in range(8)]
    if name == "E":
        return [Work(window(rng.randint(100, 300)), 64) for _ in range(64)]
    return [Work(window(64), 16) for _ in range(4)]


def percentile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else None


async def request(client: httpx.AsyncClient, url: str, model: str, work: Work) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": work.prompt,
        "max_tokens": work.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    times: list[float] = []
    usage: dict[str, int] = {}
    async with client.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
        if response.status_code != 200:
            raise RuntimeError((response.status_code, (await response.aread())[:400]))
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line[5:])
            usage = event.get("usage") or usage
            if event.get("choices"):
                times.append(time.perf_counter())
    num_tokens = usage["completion_tokens"]
    if num_tokens != work.num_output_tokens:
        raise RuntimeError(f"{num_tokens} tokens instead of {work.num_output_tokens}")
    return {
        "ttft": times[0] - begin,
        "itl": [b - a for a, b in itertools.pairwise(times)],
        "tpot": (times[-1] - times[0]) / max(1, num_tokens - 1),
        "in": usage["prompt_tokens"],
        "out": num_tokens,
    }


async def run(url: str, model: str, name: str, repeat: int, ids: list[int]) -> dict[str, Any]:
    limit = asyncio.Semaphore(CONCURRENCY[name])
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=64)) as client:

        async def limited(work: Work) -> dict[str, Any]:
            async with limit:
                return await request(client, url, model, work)

        begin = time.perf_counter()
        results = await asyncio.gather(*map(limited, workload(name, repeat, ids)))
        seconds = time.perf_counter() - begin
    itl = [gap for result in results for gap in result["itl"]]
    num_in, num_out = sum(r["in"] for r in results), sum(r["out"] for r in results)
    tpot = statistics.median(r["tpot"] for r in results)
    return {
        "work": name,
        "repeat": repeat,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(results) / seconds, 3),
        "output_tokens_per_s": round(num_out / seconds, 1),
        "prompt_tokens_per_s": round(num_in / seconds, 1),
        "decode_tokens_per_s": round(1 / tpot, 1) if tpot else None,
        "ttft_p50_s": percentile([r["ttft"] for r in results], 0.5),
        "ttft_p95_s": percentile([r["ttft"] for r in results], 0.95),
        "itl_p50_s": percentile(itl, 0.5),
        "itl_p95_s": percentile(itl, 0.95),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def memory_pss_bytes(pid: int) -> int:
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(member.memory_full_info().pss for member in family)


def wait_first_token(url: str, model: str, process: subprocess.Popen[bytes], begin: float) -> float:
    body = {"model": model, "prompt": [504, 260, 253], "max_tokens": 1, "temperature": 0}
    while process.poll() is None and time.monotonic() - begin < 600:
        try:
            if httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200:
                return time.monotonic() - begin
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit("the server did not come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base-url")
    parser.add_argument("--start", help="command of a server; {port} is filled in")
    parser.add_argument("--model", default=None, help="default: the first of /v1/models")
    parser.add_argument("--work", default="A,B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--first-repeat", type=int, default=0, help="choose other texts of equal size"
    )
    parser.add_argument("--label", default="octavo")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    model_path = find_embedded_model()
    if model_path is None:
        sys.exit("the embedded model is not installed")
    ids = corpus(load_tokenizer(open_checkpoint(model_path)))
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append({"label": args.label, **row})
        print(json.dumps(rows[-1]), flush=True)
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")

    process = None
    url = args.base_url
    begin = time.monotonic()
    if args.start:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen(shlex.split(args.start.format(port=port)))
    try:
        if process is not None:
            first = wait_first_token(url, args.model or "", process, begin)
            report({"work": "start", "first_token_s": round(first, 2)})
        model = args.model or httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        asyncio.run(run(url, model, "W", 0, ids))
        for repeat in range(args.first_repeat, args.first_repeat + args.repeats):
            for name in args.work.split(","):
                report(asyncio.run(run(url, model, name, repeat, ids)))
        if process is not None:
            report({"work": "memory", "pss_mb": round(memory_pss_bytes(process.pid) / 1e6)})
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


if __name__ == "__main__":
    main()
