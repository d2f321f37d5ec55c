"""A sequence's answer is the same in any company: real schedules, the embedded model, every precision.

Draws are from the whole vocabulary at temperature 1, where a last bit in a logit may change a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, PoolingParams, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.native, pytest.mark.slow]

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "the file's own": {},
    "activations of 8 bits": {"quantization": "int8"},
}
CROWDED = {
    "num_gpu_blocks_override": 40,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 12,
    "swap_space": 0.1,
    "check_invariants": True,
}


@pytest.fixture(scope="module", params=list(PRECISIONS))
def engines(request: pytest.FixtureRequest, model_path: Path) -> Iterator[tuple[LLM, LLM]]:
    """One that computes a sequence alone, with nothing to share; one in which little room is shared by all."""
    options = PRECISIONS[request.param]
    with (
        LLM(str(model_path), enable_prefix_caching=False, **options) as alone,
        LLM(str(model_path), **CROWDED, **options) as crowded,
    ):
        yield alone, crowded


def asked() -> st.SearchStrategy[tuple[int, int, int, int]]:
    """Prompt, its length, n, seed."""
    return st.tuples(
        st.integers(0, 3), st.integers(1, 90), st.integers(1, 3), st.integers(0, 2**31)
    )


@given(requests=st.lists(asked(), min_size=2, max_size=8), mode=st.sampled_from(["one", "all"]))
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
def test_any_schedule_gives_the_answers_computed_alone(
    engines: tuple[LLM, LLM],
    prompts: list[list[int]],
    requests: list[tuple[int, int, int, int]],
    mode: str,
) -> None:
    alone, crowded = engines
    trunk = [token for prompt in prompts for token in prompt]
    texts = [(trunk[40 * which :])[:length] for which, length, _, _ in requests]
    params = [
        SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=12, ignore_eos=True)
        for _, _, n, seed in requests
    ]
    for _ in range(1 if mode == "one" else 2):  # the second time prefixes are cached
        together = crowded.generate(texts, params, use_tqdm=False)
        for text, one, found in zip(texts, params, together, strict=True):
            for index, choice in enumerate(found.outputs):
                single = one.with_changes(n=1, seed=(one.seed or 0) + index)
                (expected,) = alone.generate(text, single, use_tqdm=False)
                assert choice.token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_any_schedule_gives_the_embeddings_computed_alone(
    engines: tuple[LLM, LLM], prompts: list[list[int]], kind: str
) -> None:
    alone, crowded = engines
    pooling = PoolingParams(kind)
    expected = [alone.embed(p, pooling_params=pooling, use_tqdm=False)[0] for p in prompts]
    for _ in range(2):  # the second time prefixes are cached
        together = crowded.embed(prompts, pooling_params=pooling, use_tqdm=False)
        for one, found in zip(expected, together, strict=True):
            assert found.outputs.embedding == one.outputs.embedding
