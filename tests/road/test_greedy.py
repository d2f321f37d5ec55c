"""Greedy output in float32 equals transformers', token for token, whatever the scheduler does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def generate(model: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], int]:
    with LLM(str(model), dtype="float32", check_invariants=True, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        stats = llm.stats()
        assert stats.num_used_blocks == 0
        assert stats.num_running == stats.num_waiting == 0
        return [output.outputs[0].token_ids for output in outputs], stats.num_preemptions


@pytest.fixture(scope="module")
def alone(model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt's output, computed alone."""
    with LLM(str(model_path), dtype="float32") as llm:
        outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    return [output.outputs[0].token_ids for output in outputs]


def test_alone(
    prompts: list[list[int]],
    alone: list[list[int]],
    greedy_choices: Callable[[list[int], list[int]], list[int]],
) -> None:
    assert [len(ids) for ids in alone] == [64] * 20
    for prompt, ids in zip(prompts, alone, strict=True):
        assert greedy_choices(prompt, ids) == ids


def test_in_a_batch_of_twenty(
    model_path: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    ids, num_preemptions = generate(model_path, prompts)
    assert ids == alone
    assert num_preemptions == 0


def test_with_a_pool_so_small_that_sequences_are_preempted(
    model_path: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    ids, num_preemptions = generate(model_path, prompts, num_gpu_blocks_override=40)
    assert ids == alone
    assert num_preemptions > 0


def test_with_prefill_chunks_of_seven(
    model_path: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    ids, _ = generate(model_path, prompts, max_num_batched_tokens=7)
    assert ids == alone
