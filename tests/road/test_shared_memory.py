"""Hits, forks, copies, swaps and preemptions change no token: float32, the embedded model.

Draws are from 20 tokens: from a whole vocabulary, one near the border between two of thousands of unlikely tokens
would show how float32 sums round with the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.stats import EngineStats

pytestmark = [pytest.mark.model, pytest.mark.slow]

PARAMS = SamplingParams(temperature=0.9, top_k=20, seed=5, n=2, max_tokens=32, ignore_eos=True)
PLAIN = {"enable_prefix_caching": False, "num_gpu_blocks_override": 600}
POOLS: dict[str, dict[str, Any]] = {
    "hits": {"num_gpu_blocks_override": 600},
    "hits in chunks": {"num_gpu_blocks_override": 600, "max_num_batched_tokens": 24},
    "recompute": {"num_gpu_blocks_override": 44},
    "recompute without a cache": {"num_gpu_blocks_override": 44, "enable_prefix_caching": False},
    "swap": {"num_gpu_blocks_override": 44, "swap_space": 0.2, "preemption_mode": "swap"},
    "swap without a cache": {
        "num_gpu_blocks_override": 44,
        "swap_space": 0.2,
        "preemption_mode": "swap",
        "enable_prefix_caching": False,
    },
}


@pytest.fixture(scope="module")
def trees(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of 60 to 150 tokens that begin alike, some inside a block, one of them twice."""
    trunk = [token for prompt in prompts[1:9] for token in prompt][:120]
    branches = [trunk[:cut] + prompts[i] for i, cut in enumerate((64, 64, 70, 71, 80, 93, 120))]
    return [*branches, trunk[:96], trunk[:96], trunk[:75]]


def outputs(
    model: Path, prompts: Sequence[list[int]], options: dict[str, Any], rounds: int
) -> tuple[list[list[list[int]]], EngineStats]:
    """Token ids of every choice, of the last round."""
    with LLM(str(model), dtype="float32", check_invariants=True, **options) as llm:
        for _ in range(rounds - 1):
            llm.generate(list(prompts), PARAMS, use_tqdm=False)
        found = llm.generate(list(prompts), PARAMS, use_tqdm=False)
        stats = llm.stats()
        assert stats.num_used_blocks == 0
        return [[one.token_ids for one in request.outputs] for request in found], stats


@pytest.fixture(scope="module")
def unshared(model_path: Path, trees: list[list[int]]) -> list[list[list[int]]]:
    """Each prompt's choices, each computed alone with nothing to share."""
    with LLM(str(model_path), dtype="float32", **PLAIN) as llm:
        choices = []
        for prompt in trees:
            alone = [
                llm.generate(prompt, PARAMS.with_changes(n=1, seed=5 + i), use_tqdm=False)[0]
                for i in range(2)
            ]
            choices.append([one.outputs[0].token_ids for one in alone])
        assert llm.stats().num_block_copies == 0
    return choices


@pytest.mark.parametrize("name", list(POOLS))
def test_outputs_are_those_of_sequences_computed_alone(
    model_path: Path, trees: list[list[int]], unshared: list[list[list[int]]], name: str
) -> None:
    found, stats = outputs(model_path, trees, POOLS[name], rounds=2)
    assert found == unshared
    assert stats.num_block_copies > 0
    is_small, is_cached = "hits" not in name, "without" not in name
    assert bool(stats.num_preemptions) == is_small
    assert bool(stats.num_preemptions_by_swap) == ("swap" in name)
    assert bool(stats.num_blocks_swapped_in) == ("swap" in name)
    assert bool(stats.prefix_cache_hits) == is_cached
    if is_cached:
        assert stats.prefix_cache_inside_block_hits > 0
