"""What transformers' code costs over octavo's, on one model: ``--model-impl transformers`` against ``octavo``.

    python benchmarks/model_impl.py --shape SmolLM2-135M --dtype float32

A model of that shape with random weights generates greedily, in this process: one stream, then eight at once. The
two implementations take turns. One JSON line: tokens a second of each, and the medians of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from model_shapes import SHAPES
from random_model import write_model

from octavo import LLM, SamplingParams

IMPLS = ("octavo", "transformers")
PROMPT_TOKENS = 32


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="SmolLM2-135M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_model(path, SHAPES[args.shape], getattr(torch, args.dtype))
        engines = {impl: LLM(str(path), model_impl=impl, dtype=args.dtype) for impl in IMPLS}
        result = {
            f"{streams} streams": compare(engines, streams, args.tokens, args.repeats)
            for streams in (1, 8)
        }
        for engine in engines.values():
            engine.close()
    print(json.dumps({"shape": args.shape, "dtype": args.dtype, **result}))


def compare(
    engines: dict[str, LLM], streams: int, tokens: int, repeats: int
) -> dict[str, list[float] | float]:
    """Tokens a second, and how many times more octavo's code has."""
    rates: dict[str, list[float]] = {impl: [] for impl in IMPLS}
    for _ in range(repeats):
        for impl, engine in engines.items():
            rates[impl].append(rate(engine, streams, tokens))
    ratios = [own / other for own, other in zip(*(rates[impl] for impl in IMPLS), strict=True)]
    return {**rates, "ratio": statistics.median(ratios)}


def rate(engine: LLM, streams: int, tokens: int) -> float:
    """Tokens a second of all streams together, prompts included in the time."""
    prompts = [{"prompt_token_ids": [stream + 3] * PROMPT_TOKENS} for stream in range(streams)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return streams * tokens / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
