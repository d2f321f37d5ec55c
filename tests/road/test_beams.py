"""Beam search in float32 equals transformers' ``num_beams``, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

EOS = 2


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(str(model_path), dtype="float32", check_invariants=True) as running:
        yield running


def oracle_beams(
    oracle: Any, prompt: list[int], **options: Any
) -> tuple[list[list[int]], list[float]]:
    """Outputs without padding, and scores, of transformers' beam search."""
    import torch

    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    outputs = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in options["eos_token_id"]]
        outputs.append(row[: ends[0] + 1] if ends else row)
    return outputs, found.sequences_scores.tolist()


@pytest.mark.parametrize(
    ("index", "width", "n", "options"),
    [
        (0, 2, 2, {}),
        (0, 4, 4, {"length_penalty": 0.0}),
        (4, 4, 2, {"early_stopping": True}),
        (6, 3, 3, {"length_penalty": 2.0, "early_stopping": "never"}),
        (9, 6, 6, {}),
        (12, 4, 4, {"length_penalty": -1.0, "early_stopping": "never"}),
        (17, 4, 1, {"length_penalty": 1.5}),
    ],
)
@pytest.mark.parametrize("stop_token_ids", [(), (30, 28)])
def test_equals_transformers(
    llm: LLM,
    oracle: Any,
    prompts: list[list[int]],
    index: int,
    width: int,
    n: int,
    options: dict[str, Any],
    stop_token_ids: tuple[int, ...],
) -> None:
    prompt = prompts[index]
    params = SamplingParams(
        use_beam_search=True,
        n=n,
        best_of=width,
        max_tokens=24,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=True,
        **options,
    )
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    wanted, scores = oracle_beams(
        oracle,
        prompt,
        num_beams=width,
        num_return_sequences=n,
        max_new_tokens=24,
        eos_token_id=[EOS, *stop_token_ids],
        **options,
    )
    assert [one.token_ids for one in output.outputs] == wanted
    penalty = options.get("length_penalty", 1.0)
    for one, score in zip(output.outputs, scores, strict=True):
        assert one.cumulative_logprob is not None
        assert one.cumulative_logprob / len(one.token_ids) ** penalty == pytest.approx(
            score, rel=2e-5, abs=1e-3
        )


def test_beams_of_many_requests_at_once_and_preempted_are_the_same(
    llm: LLM, model_path: Path, prompts: list[list[int]]
) -> None:
    params = SamplingParams(use_beam_search=True, n=3, max_tokens=24, ignore_eos=True)
    some = prompts[:8]
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in some]
    for options in ({}, {"num_gpu_blocks_override": 24}, {"swap_space": 0.05}):
        tiny = {"num_gpu_blocks_override": 24, **options} if options else {}
        mode = {"preemption_mode": "swap"} if "swap_space" in options else {}
        with LLM(str(model_path), dtype="float32", check_invariants=True, **tiny, **mode) as other:
            together = other.generate(some, params, use_tqdm=False)
            stats = other.stats()
            assert bool(stats.num_preemptions) == bool(options)
            assert bool(stats.num_preemptions_by_swap) == bool(mode)
        for left, right in zip(alone, together, strict=True):
            assert [o.token_ids for o in left.outputs] == [o.token_ids for o in right.outputs]
