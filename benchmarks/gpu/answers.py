"""The engine against transformers on tiny random models: greedy, batched, in chunks, with a small pool."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from model_shapes import SHAPES, Shape
from random_model import write_model

from octavo import LLM, SamplingParams
from octavo.engine.execution.runner import ModelRunner
from octavo.engine.execution.warm_up import cleanup_step, kernel_steps

from .common import Machine, Row, attempt

MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""How far below transformers' best logit, as a share of its largest, a chosen token's may lie."""
GROUPED = Shape(320, 256, 192, 2, 8, 2, 128, False, max_positions=512)
ODD = Shape(320, 160, 192, 2, 4, 4, 80, False, max_positions=512)
MODELS = [
    ("head 64, 2 heads", SHAPES["tiny"], torch.float32),
    ("head 64, 2 heads", SHAPES["tiny"], torch.bfloat16),
    ("head 128, 8 heads", GROUPED, torch.bfloat16),
    ("head 80, 4 heads", ODD, torch.float32),
]


def run(machine: Machine) -> Iterator[Row]:
    for name, shape, dtype in MODELS[:1] if machine.is_dry else MODELS:
        title = f"greedy, {name}, {str(dtype).removeprefix('torch.')}"
        yield attempt(title, partial(_compare, shape, dtype, machine))
    if not machine.is_dry:
        yield attempt("no step waits before its samples", partial(_without_waiting, machine))


def _compare(shape: Shape, dtype: torch.dtype, machine: Machine) -> Row:
    from transformers import AutoModelForCausalLM

    count = 4 if machine.is_dry else 32
    prompts = [
        [(7 * i + j) % 300 for j in range(length)] for i, length in enumerate((3, 17, 40, 90, 1))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    options: dict[str, Any] = {
        "attention_backend": "triton",
        "device": machine.device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "num_gpu_blocks_override": 60,
        "check_invariants": True,
    }
    if machine.is_dry:
        options |= {"max_num_batched_tokens": 48, "max_num_seqs": 16}
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), shape, dtype)
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(machine.device).eval()
        found: list[list[Any]] = []
        late: list[str] = []
        for changes in (
            {},
            {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 24, "max_num_seqs": 16},
        ):
            with LLM(str(path), **{**options, **changes}) as llm, _compiled_into(late):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    worst = max(
        _shortfall(theirs, prompt, ids, machine)
        for answers in found
        for prompt, ids in zip(prompts, answers, strict=True)
    )
    same = sum(a == b for a, b in zip(*found, strict=True))
    note = (
        f"worst chosen logit {worst:.1e} below the best; {same} of {len(prompts)} alike in chunks; "
        f"compiled after warm-up: {', '.join(late) or 'nothing'}"
    )
    return {"ok": worst <= MARGIN[dtype] and not late, "note": note}


@contextmanager
def _compiled_into(names: list[str]) -> Iterator[None]:
    """Names of the kernels that are compiled, or read from Triton's cache, meanwhile."""

    def note(**details: Any) -> None:
        names.append(str(details["repr"]).partition("[")[0])

    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = None


def _shortfall(theirs: Any, prompt: list[int], output: list[int], machine: Machine) -> float:
    """By how much transformers prefers another token to one that was chosen, at worst."""
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt + output], device=machine.device)).logits[0].float()
    logits = logits[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output, device=machine.device).unsqueeze(1)).squeeze(1)
    return float(((logits.amax(dim=-1) - chosen) / logits.abs().amax(dim=-1)).max())


def _without_waiting(machine: Machine) -> Row:
    """PyTorch raises where submitting a step makes the host wait."""
    from random_model import build_model

    ops = machine.ops()
    model = build_model(SHAPES["tiny"], ops, torch.bfloat16, machine.device)
    runner = ModelRunner(
        model, ops, num_blocks=64, block_size=16, max_num_seqs=16, max_model_len=512,
        device=machine.device, eos_token_ids=(),
    )  # fmt: skip
    runner.warm_up(256, 4)
    runner.warm_up_kernels(256, 16, lambda _share: None)
    steps = kernel_steps(
        max_num_tokens=256, max_num_seqs=16, block_size=16, num_blocks=64, max_model_len=512
    )
    for step in steps:
        torch.cuda.set_sync_debug_mode("error")
        try:
            handle = runner.submit(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        handle.result()
        runner.submit(cleanup_step(step)).result()
    return {"ok": True, "note": f"{len(steps)} steps"}
