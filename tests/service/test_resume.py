"""How a request that lives is told to an engine that does not know it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.api import FinishReason, PoolingParams, ResumedSequence, SamplingParams
from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.scheduling.request import NewRequest, SequenceUpdate
from octavo.engine.service.admission import Admitted
from octavo.engine.service.engine_stream import EngineStream
from octavo.engine.service.output import RequestState
from octavo.engine.step import SampleLogprobs
from octavo.engine.text.tokenizer import Tokenizer, load_tokenizer

SCORE = SampleLogprobs(-1.0, 1, ())


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(tiny_model))


@pytest.fixture
def start(tokenizer: Tokenizer) -> Callable[..., RequestState]:
    def start(pooling: PoolingParams | None = None, **params: Any) -> RequestState:
        sampling = SamplingParams(max_tokens=8, **params)
        new = NewRequest("r", [1, 2, 3], sampling, 1, 0.0, pooling=pooling)
        return RequestState(Admitted(new, "abc", {}, True), tokenizer)

    return start


def give(state: RequestState, child: int, *token_ids: int, **more: Any) -> None:
    state.advance(SequenceUpdate("r", child, token_ids, **more), 1.0)


def test_what_has_no_token_yet_is_told_as_it_was(start: Any) -> None:
    for state in (start(), start(n=3), start(pooling=PoolingParams(pooling_type="last"))):
        assert state.resume() == state.admitted.new


def test_each_sequence_goes_on_after_its_own_tokens(start: Any) -> None:
    state = start(n=3)
    for child in range(3):
        give(state, child, 10 + child)
    give(state, 1, 20, finish_reason=FinishReason.STOP)
    give(state, 2, 21)
    expected = (
        ResumedSequence((10,)),
        ResumedSequence((11, 20), is_finished=True),
        ResumedSequence((12, 21)),
    )
    assert state.resume().resume == expected
    give(state, 2, 22)
    assert state.resume().resume[2] == ResumedSequence((12, 21, 22))


def test_a_sequence_that_a_stop_string_ended_stays_ended(start: Any, tokenizer: Any) -> None:
    state = start(n=2, stop=("b",))
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    give(state, 0, a)
    give(state, 1, b)
    assert state.resume().resume == (ResumedSequence((a,)), ResumedSequence((b,), True))


def test_prompt_logprobs_are_told_once(start: Any) -> None:
    state = start(prompt_logprobs=1)
    first, second = (SampleLogprobs(logprob, 1, ()) for logprob in (-1.0, -2.0))
    give(state, 0, prompt_logprobs=(first,))
    assert state.resume().sampling.prompt_logprobs == 1  # half of them: from the start
    give(state, 0, prompt_logprobs=(first, second))
    give(state, 0, 10)
    resumed = state.resume()
    assert resumed.sampling.prompt_logprobs is None
    assert resumed.resume == (ResumedSequence((10,)),)
    give(state, 0, 11)
    told: Any = state.output([], None).prompt_logprobs
    assert told[0] is None
    assert [entry[i].logprob for i, entry in ((2, told[1]), (3, told[2]))] == [-1.0, -2.0]


def test_ranked_choices_start_over(start: Any) -> None:
    state = start(n=1, best_of=2)
    for child in range(2):
        give(state, child, 10, logprobs=(SCORE,))
    give(state, 0, 11, logprobs=(SCORE,), finish_reason=FinishReason.LENGTH)
    assert state.has_gained()
    assert state.resume() == state.admitted.new
    give(state, 0, 10, logprobs=(SCORE,))
    assert not state.has_gained()  # not as far as before
    assert state.resume() == state.admitted.new
    for child in range(2):
        give(state, child, 10 + child, logprobs=(SCORE,), finish_reason=FinishReason.LENGTH)
    assert state.is_finished
    assert state.record(2.0).num_generation_tokens == 2


def test_each_hand_over_has_an_id_of_its_own(start: Any) -> None:
    state = start()
    stream = EngineStream(state, lambda _: None)
    ids = [stream.hand(state.resume()).request_id for _ in range(3)]
    assert len(set(ids)) == 3
    assert stream.engine_id == ids[-1]
    assert stream.request_id == "r"
