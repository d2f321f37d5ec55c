"""Whole steps of the engine's executor: decodes of 1, 32 and 256 sequences, and a prompt.

Times are from submitting a step to having its tokens, host included, next to the device's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import roofline
import torch
from model_shapes import SHAPES, Shape
from random_model import build_model

from octavo.engine.api import SamplingParams
from octavo.engine.execution.kv_cache import kv_block_bytes
from octavo.engine.execution.runner import ModelRunner
from octavo.engine.models.model import Model
from octavo.engine.step import NewRow, ScheduledRow, StepPlan

from .common import Machine, Row, attempt, time_of

BLOCK = 16
BATCHES = (1, 32, 256)
CONTEXT = 1024
PROMPT = 2048
NUM_STEPS = 20
GREEDY = SamplingParams(temperature=0.0)


def run(machine: Machine) -> Iterator[Row]:
    for name in ("tiny",) if machine.is_dry else ("Qwen3-0.6B", "Llama-3-8B"):
        yield from _of_model(name, SHAPES[name], machine)


def _of_model(name: str, shape: Shape, machine: Machine) -> Iterator[Row]:
    model = build_model(shape, machine.ops(), torch.bfloat16, machine.device)
    context, prompt = (20, 30) if machine.is_dry else (CONTEXT, PROMPT)
    for batch in (2,) if machine.is_dry else BATCHES:
        title = f"decode step, {name}, batch {batch} over {context}"
        if not _fits(model, batch, context, machine):
            yield {"name": title, "note": "too little memory"}
            continue
        work = roofline.step(shape, [(context, 1)] * batch)
        measure = partial(_decode, model, batch, context, machine)
        yield attempt(title, partial(_timed_step, measure, work, batch, machine))
    work = roofline.step(shape, [(prompt, prompt)])
    measure = partial(_prefill, model, prompt, machine)
    title = f"prefill of {prompt}, {name}"
    yield attempt(title, partial(_timed_step, measure, work, prompt, machine))


def _timed_step(
    measure: Callable[[], tuple[float, float]],
    work: roofline.Work,
    num_tokens: int,
    machine: Machine,
) -> Row:
    wall, device = measure()
    row = time_of(wall, work, machine)
    row["note"] = (
        f"{row.get('note', '')}; {num_tokens / wall:,.0f} tokens/s; device {device * 1e3:.2f} ms"
    )
    return row


def _fits(model: Model, batch: int, context: int, machine: Machine) -> bool:
    if machine.is_dry:
        return True
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(machine.device)
    return batch * _num_blocks(context) * kv_block_bytes(model, BLOCK) < 0.8 * free


def _num_blocks(context: int) -> int:
    return -(-(context + NUM_STEPS + 8) // BLOCK)


def _runner(model: Model, batch: int, context: int, machine: Machine) -> ModelRunner:
    return ModelRunner(
        model,
        machine.ops(),
        num_blocks=batch * _num_blocks(context),
        block_size=BLOCK,
        max_num_seqs=batch,
        max_model_len=_num_blocks(context) * BLOCK,
        device=machine.device,
        eos_token_ids=(),
    )


def _decode(model: Model, batch: int, context: int, machine: Machine) -> tuple[float, float]:
    """Median seconds of a step: all of it, and on the device. What the rows attend to is zeros."""
    runner = _runner(model, batch, context, machine)
    width = _num_blocks(context)
    tables = [list(range(row * width, (row + 1) * width)) for row in range(batch)]
    news = tuple(NewRow(row, [7] * context, (), GREEDY, row) for row in range(batch))
    times = []
    for index in range(4 if machine.is_dry else NUM_STEPS):
        rows = tuple(
            ScheduledRow(row, context - 1 + index, 1, 1, (tables[row],), width if index else 0)
            for row in range(batch)
        )
        plan = StepPlan(index, new_rows=news if index == 0 else (), rows=rows)
        times.append(_time(runner, plan, machine))
    return _medians(times[3:])


def _prefill(model: Model, length: int, machine: Machine) -> tuple[float, float]:
    runner = _runner(model, 1, length, machine)
    table = list(range(_num_blocks(length)))
    times = []
    for index in range(2 if machine.is_dry else 8):
        new = NewRow(index, [7] * length, (), GREEDY, 0)
        row = ScheduledRow(index, 0, length, 1, (table,), 0)
        plan = StepPlan(
            index, removed_seq_ids=(index - 1,) if index else (), new_rows=(new,), rows=(row,)
        )
        times.append(_time(runner, plan, machine))
    return _medians(times[1:] if machine.is_dry else times[3:])


def _time(runner: ModelRunner, plan: StepPlan, machine: Machine) -> tuple[float, float]:
    if machine.is_dry:
        begin_s = time.perf_counter()
        runner.submit(plan).result()
        return (time.perf_counter() - begin_s,) * 2
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(machine.device)
    begin_s = time.perf_counter()
    begin.record()
    handle = runner.submit(plan)
    end.record()
    handle.result()
    seconds = time.perf_counter() - begin_s
    return seconds, begin.elapsed_time(end) / 1e3


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    wall, device = zip(*times, strict=True)
    return statistics.median(wall), statistics.median(device)
