"""What sharing memory saves over HTTP: two servers, prefix cache on and off, asked in turn.

| | work | against |
|---|---|---|
| C | 32 requests sharing 512 tokens, 32 own, 64 out, nothing of it cached before | the same, cache off |
| n8 | n = 8 on a 512-token prompt, 16 tokens out | eight requests for one choice each, cache off |

    python benchmarks/sharing.py [--rounds 3] [--output FILE]

Prints one JSON line per round and the ratios of medians. Both servers are up all the time and share the
machine's cores; only one is asked at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parent))
from serve import corpus, free_port, run, wait_first_token, workload

from octavo.engine.checkpoint.checkpoint import find_embedded_model, open_checkpoint
from octavo.engine.text.tokenizer import load_tokenizer


@contextmanager
def server(*flags: str) -> Iterator[str]:
    """The address of a running octavo with the embedded model."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "octavo", "serve", "--port", str(port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_first_token(url, "", process, time.monotonic())
        yield url
    finally:
        process.terminate()
        process.wait(30)


def choices(url: str, prompt: list[int], n: int, num_requests: int) -> float:
    """Seconds until ``num_requests`` requests for ``n`` choices of 16 tokens are answered."""
    body = {
        "prompt": prompt,
        "n": n,
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 1,
        "ignore_eos": True,
    }

    async def ask_all() -> None:
        async with httpx.AsyncClient(timeout=600) as client:
            asked = [
                client.post(f"{url}/v1/completions", json=body | {"seed": 1 + i})
                for i in range(num_requests)
            ]
            for answer in await asyncio.gather(*asked):
                answer.raise_for_status()

    begin = time.perf_counter()
    asyncio.run(ask_all())
    return time.perf_counter() - begin


def prompt_tokens_computed(url: str) -> float:
    """From the server's metrics, so far."""
    text = httpx.get(f"{url}/metrics").text
    lines = [line for line in text.splitlines() if 'source="local_compute"' in line]
    return sum(float(line.split()[-1]) for line in lines if "prompt_tokens_by_source" in line)


def one_round(cached: str, plain: str, number: int, ids: list[int]) -> dict[str, Any]:
    model = httpx.get(f"{cached}/v1/models").json()["data"][0]["id"]
    prompt = workload("C", 1000 + number, ids)[0].prompt[:512]
    before = prompt_tokens_computed(cached), prompt_tokens_computed(plain)
    row = {
        "round": number,
        "C_cached_s": asyncio.run(run(cached, model, "C", number, ids))["seconds"],
        "C_plain_s": asyncio.run(run(plain, model, "C", number, ids))["seconds"],
        "n8_forked_s": round(choices(cached, prompt, 8, 1), 3),
        "n8_plain_s": round(choices(plain, prompt, 1, 8), 3),
    }
    row["cached_prompt_tokens"] = prompt_tokens_computed(cached) - before[0]
    row["plain_prompt_tokens"] = prompt_tokens_computed(plain) - before[1]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    model_path = find_embedded_model()
    if model_path is None:
        sys.exit("the embedded model is not installed")
    ids = corpus(load_tokenizer(open_checkpoint(model_path)))
    rows: list[dict[str, Any]] = []
    with server() as cached, server("--no-enable-prefix-caching") as plain:
        for url in (cached, plain):
            asyncio.run(
                run(url, httpx.get(f"{url}/v1/models").json()["data"][0]["id"], "W", 0, ids)
            )
        for number in range(args.rounds):
            rows.append(one_round(cached, plain, number, ids))
            print(json.dumps(rows[-1]), flush=True)
    ratios = {
        f"{name}_ratio": round(
            statistics.median(r[f"{name}_{kind}_s"] for r in rows)
            / statistics.median(r[f"{name}_plain_s"] for r in rows),
            3,
        )
        for name, kind in (("C", "cached"), ("n8", "forked"))
    }
    print(json.dumps(ratios))
    if args.output:
        args.output.write_text("".join(json.dumps(line) + "\n" for line in [*rows, ratios]))


if __name__ == "__main__":
    main()
