"""The offline run that readable engines publish: Qwen3-0.6B's shape, 256 sequences, inputs and outputs uniform
in 100 to 1024 tokens, seed 0, 133,966 output tokens.

The shape is run as the Llama family: Qwen3's norms of queries and keys are missing, and weights are random.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from model_shapes import SHAPES
from random_model import write_model

from octavo import LLM, SamplingParams

from .common import Machine, Row


def run(machine: Machine) -> Iterator[Row]:
    name, num_seqs, least, most = (
        ("tiny", 2, 2, 6) if machine.is_dry else ("Qwen3-0.6B", 256, 100, 1024)
    )
    random = Random(0)
    vocabulary = 300 if machine.is_dry else 10000
    prompts = [
        [random.randint(0, vocabulary) for _ in range(random.randint(least, most))]
        for _ in range(num_seqs)
    ]
    params = [
        SamplingParams(
            temperature=0.6, ignore_eos=True, seed=i, max_tokens=random.randint(least, most)
        )
        for i in range(num_seqs)
    ]
    options: dict[str, Any] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
    }
    if machine.is_dry:
        options = {
            "num_gpu_blocks_override": 40,
            "dtype": "float32",
            "max_num_batched_tokens": 48,
            "max_num_seqs": 16,
        }
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), SHAPES[name], torch.bfloat16, machine.device.type)
        begin = time.perf_counter()
        llm = LLM(str(path), attention_backend="triton", device=machine.device.type, **options)
        start_s = time.perf_counter() - begin
        with llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            preemptions = llm.stats().num_preemptions
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    wanted = sum(one.max_tokens or 0 for one in params)
    note = f"{num_tokens:,} tokens in {seconds:.2f} s, {preemptions} preemptions"
    yield {"name": f"start, {name}", "value": start_s, "unit": "s"}
    yield {
        "name": f"offline, {name}, {num_seqs} sequences",
        "value": num_tokens / seconds,
        "unit": "tokens/s",
        "ok": num_tokens == wanted and (machine.is_dry or num_tokens == 133_966),
        "note": note,
    }
