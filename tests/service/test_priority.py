"""Priorities at the door: who may have one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.errors import InvalidRequestError, NotSupportedError

SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), check_invariants=True, num_gpu_blocks_override=40) as llm:
        yield llm


@pytest.fixture(scope="module")
def ordered(tiny_model: Path) -> Iterator[LLM]:
    with LLM(
        str(tiny_model),
        check_invariants=True,
        num_gpu_blocks_override=8,
        max_num_seqs=2,
        scheduling_policy="priority",
    ) as llm:
        yield llm


def test_priorities_change_who_is_first_and_no_text(llm: LLM, ordered: LLM) -> None:
    prompts = [f"prompt {i}" * 3 for i in range(6)]
    plain = llm.generate(prompts, SHORT, use_tqdm=False)
    by_priority = ordered.generate(prompts, SHORT, use_tqdm=False, priority=[6, 5, 4, 3, 2, 1])
    assert [o.outputs[0].text for o in plain] == [o.outputs[0].text for o in by_priority]
    starts = [o.metrics.scheduled_time for o in by_priority if o.metrics is not None]
    assert starts == sorted(starts, key=lambda s: -(s or 0.0))


def test_without_the_policy_a_priority_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(NotSupportedError, match="--scheduling-policy priority") as refusal:
        llm.generate("a", SHORT, use_tqdm=False, priority=[1])
    assert refusal.value.param == "priority"
    assert llm.generate("a", SHORT, use_tqdm=False, priority=[0])[0].finished


@pytest.mark.parametrize("priority", [[1.5], [True], [2**63], ["1"], [0, 0]])
def test_what_is_no_priority_is_refused(ordered: LLM, priority: list[Any]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        ordered.generate("a", SHORT, use_tqdm=False, priority=priority)
    assert refusal.value.param == "priority"
