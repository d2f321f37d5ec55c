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


def embedded_corpus() -> list[int]:
    """The corpus in tokens of the embedded model."""
    model_path = find_embedded_model()
    if model_path is None:
        sys.exit("the embedded model is not installed")
    return corpus(load_tokenizer(open_checkpoint(model_path)))


def workload(name: str, repeat: int, ids: list[int]) -> list[Work]:
    """The requests of workload ``name``; ``W`` is a short warm-up."""
    rng = random.Random(f"{name}{repeat}")

    def cut(length: int) -> list[int]:
        return window(rng, ids, length)

    if name == "A":
        return [Work(cut(128), 128) for _ in range(32)]
    if name == "B":
        return [Work(cut(128), 128)]
    if name == "C":
        shared = cut(512)
        return [Work(shared + cut(32), 64) for _ in range(32)]
    if name == "D":
        return [Work(cut(1024), 1) for _ in range(8)]
    if name == "E":
        return [Work(cut(rng.randint(100, 300)), 64) for _ in range(64)]
    if name == "W":
        return [Work(cut(64), 16) for _ in range(4)]
    raise ValueError(f"no workload {name!r}; there are {', '.join(CONCURRENCY)}")


def window(rng: random.Random, ids: list[int], length: int) -> list[int]:
    begin = rng.randrange(len(ids) - length)
    return ids[begin : begin + length]


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
    check_lengths(work, usage["prompt_tokens"], usage["completion_tokens"])
    return {
        "ttft": times[0] - begin,
        "itl": [b - a for a, b in itertools.pairwise(times)],
        "tpot": (times[-1] - times[0]) / max(1, work.num_output_tokens - 1),
        "in": usage["prompt_tokens"],
        "out": usage["completion_tokens"],
    }


def check_lengths(work: Work, num_in: int, num_out: int) -> None:
    """An engine that adds or leaves out tokens did other work than it was asked."""
    if (num_in, num_out) != (len(work.prompt), work.num_output_tokens):
        raise RuntimeError(
            f"{num_in} tokens in, {num_out} out instead of {len(work.prompt)} and "
            f"{work.num_output_tokens}"
        )


async def run(url: str, model: str, name: str, repeat: int, ids: list[int]) -> dict[str, Any]:
    limit = asyncio.Semaphore(CONCURRENCY[name])
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=64)) as client:

        async def limited(work: Work) -> dict[str, Any]:
            async with limit:
                return await request(client, url, model, work)

        begin = time.perf_counter()
        results = await asyncio.gather(*map(limited, workload(name, repeat, ids)))
        seconds = time.perf_counter() - begin
    return {"work": name, "repeat": repeat, **summary(results, seconds)}


def summary(results: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The figures of requests that took ``seconds`` together. ``itl`` may be empty."""
    itl = [gap for result in results for gap in result["itl"]]
    num_in, num_out = sum(r["in"] for r in results), sum(r["out"] for r in results)
    tpot = statistics.median(r["tpot"] for r in results)
    return {
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
    """Seconds from ``begin`` until the server has streamed its first token."""
    body = {"model": model, "prompt": [504, 260, 253], "max_tokens": 1, "temperature": 0}
    body["stream"] = True
    with httpx.Client(timeout=60) as client:
        while process.poll() is None and time.monotonic() - begin < 600:
            try:
                with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                    if response.status_code == 200:
                        next(line for line in response.iter_lines() if line.startswith("data:"))
                        return time.monotonic() - begin
                    if response.status_code != 503:  # it is still loading
                        raise SystemExit(f"the server answered {response.read()[:400]!r}")
            except httpx.TransportError:
                pass
            time.sleep(0.02)
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
    ids = embedded_corpus()
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
