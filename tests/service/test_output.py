"""What a caller sees of several sequences: best_of, beams, aborts and errors among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.api import FinishReason, RequestOutput, SamplingParams
from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.scheduling.request import NewRequest, SequenceUpdate
from octavo.engine.service.admission import Admitted
from octavo.engine.service.output import RequestState, merge
from octavo.engine.step import SampleLogprobs
from octavo.engine.text.tokenizer import Tokenizer, load_tokenizer

STOP, LENGTH, ABORT, ERROR = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
)
END_ID = 256


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(tiny_model))


@pytest.fixture
def start(tokenizer: Tokenizer) -> Callable[..., RequestState]:
    def start(**params: Any) -> RequestState:
        new = NewRequest("r", [1, 2, 3], SamplingParams(max_tokens=8, **params), 1, 0.0)
        return RequestState(Admitted(new, "abc", {}, True), tokenizer)

    return start


@pytest.fixture
def token(tokenizer: Tokenizer) -> Callable[[int, str, float], SequenceUpdate]:
    """One token of a child, with its log-probability."""

    def token(
        child: int, text: str, logprob: float, reason: FinishReason | None = None, **more: Any
    ) -> SequenceUpdate:
        logprobs = (SampleLogprobs(logprob, 1, ()),)
        (token_id,) = [END_ID] if not text else tokenizer.encode(text)
        return SequenceUpdate("r", child, (token_id,), reason, logprobs=logprobs, **more)

    return token


def play(state: RequestState, *updates: SequenceUpdate) -> RequestOutput:
    """The last output; those before must be empty."""
    *early, last = [state.apply(update, 1.0)[0] for update in updates]
    assert all(not output.outputs and not output.finished for output in early)
    return last


def test_the_best_by_mean_come_back_numbered_from_the_best_on(start: Any, token: Any) -> None:
    last = play(
        start(n=2, best_of=3),
        token(0, "a", -1.0, num_cached_tokens=2),
        token(1, "b", -0.5, LENGTH),
        token(2, "c", -9.0, LENGTH),
        token(0, "d", -0.25),
        token(0, "e", -0.0, LENGTH),
    )
    first, second = last.outputs
    assert (first.index, first.text, first.cumulative_logprob) == (0, "ade", -1.25)
    assert (second.index, second.text, second.cumulative_logprob) == (1, "b", -0.5)
    assert last.finished
    assert last.num_discarded_tokens == 1
    assert last.num_cached_tokens == 2
    assert first.logprobs is None


def test_of_equals_the_first_is_better(start: Any, token: Any) -> None:
    state = start(n=1, best_of=2)
    last = play(state, token(1, "b", -1.0, LENGTH), token(0, "a", -1.0, LENGTH))
    assert [output.text for output in last.outputs] == ["a"]


def test_an_end_id_counts_for_the_mean_but_not_for_the_text(start: Any, token: Any) -> None:
    last = play(
        start(n=1, best_of=2),
        token(0, "a", -1.0),
        token(1, "b", -0.9, LENGTH),
        token(0, "", -0.5, STOP),
    )
    assert [(o.text, o.finish_reason, len(o.token_ids)) for o in last.outputs] == [("a", STOP, 2)]


def test_a_stop_string_ends_a_child_and_later_tokens_do_not_count(start: Any, token: Any) -> None:
    state = start(n=1, best_of=2, stop=("b",))
    state.apply(token(0, "a", -0.5), 1.0)
    output, stopped = state.apply(token(0, "b", -0.5), 1.0)
    assert (output.outputs, stopped) == ([], (0,))
    assert state.apply(token(0, "c", -99.0), 1.0) == (output, ())
    last = play(state, token(1, "x", -0.6, LENGTH))
    (best,) = last.outputs
    assert (best.text, best.finish_reason, best.stop_reason) == ("a", STOP, "b")
    assert best.cumulative_logprob == -1.0
    assert last.num_discarded_tokens == 1


def test_abort_half_way_ends_each_of_the_n_choices(start: Any, token: Any) -> None:
    state = start(n=2, best_of=3)
    play(state, token(0, "a", -3.0), token(1, "b", -1.0, LENGTH), token(2, "c", -2.0))
    output = state.abort()
    assert output.finished
    assert [(o.index, o.text, o.finish_reason) for o in output.outputs] == [
        (0, "b", ABORT),
        (1, "c", ABORT),
    ]
    assert output.num_discarded_tokens == 1
    assert state.record(2.0).finish_reason is ABORT
    assert state.record(2.0).num_generation_tokens == 3


def test_abort_before_the_first_token(start: Any) -> None:
    for params in ({"n": 2, "best_of": 4}, {"n": 2, "best_of": 4, "use_beam_search": True}):
        output = start(**params).abort()
        assert [(o.index, o.token_ids, o.finish_reason) for o in output.outputs] == [
            (0, [], ABORT),
            (1, [], ABORT),
        ]


def test_an_error_of_one_child_is_that_of_the_request(start: Any, token: Any) -> None:
    state = start(n=1, best_of=3)
    play(state, token(0, "a", -1.0, LENGTH), token(1, "b", -1.0))
    update = SequenceUpdate("r", 1, (), ERROR, error="not finite")
    output, stopped = state.apply(update, 1.0)
    assert [(o.index, o.finish_reason) for o in output.outputs] == [(0, ERROR)]
    assert (output.error, output.finished, stopped) == ("not finite", True, (2,))


def test_an_error_of_one_of_n_plain_choices_is_its_own(start: Any, token: Any) -> None:
    state = start(n=2)
    output, _ = state.apply(SequenceUpdate("r", 1, (), ERROR, error="not finite"), 1.0)
    assert not output.finished
    output, _ = state.apply(token(0, "a", -1.0, LENGTH), 1.0)
    assert output.finished


def test_the_record_of_best_of_is_of_all_sequences(start: Any, token: Any) -> None:
    state = start(n=1, best_of=2)
    play(
        state,
        token(0, "a", -2.0, num_cached_tokens=1),
        token(0, "a", -2.0, LENGTH),
        token(1, "", -0.1, STOP),
    )
    record = state.record(2.0)
    assert record.finish_reason is STOP
    assert (record.num_generation_tokens, record.max_num_generation_tokens) == (3, 2)
    assert (record.n, record.num_cached_tokens) == (1, 1)


def beams(tokenizer: Tokenizer) -> list[SequenceUpdate]:
    a, b = tokenizer.encode("ab")
    return [
        SequenceUpdate(
            "r", 0, (a, b, END_ID), STOP, scheduled_time=0.5, num_cached_tokens=2,
            cumulative_logprob=-1.5,
        ),
        SequenceUpdate("r", 1, (b, 257), STOP, stop_token_id=257, cumulative_logprob=-2.5),
        SequenceUpdate("r", 2, (b, b, b), LENGTH, cumulative_logprob=-3.5),
    ]  # fmt: skip


def test_hypotheses_come_whole(start: Any, tokenizer: Tokenizer) -> None:
    state = start(n=3, best_of=4, use_beam_search=True, stop_token_ids=(257,))
    output, _ = state.apply(beams(tokenizer)[0], 1.0)
    for update in beams(tokenizer)[1:]:
        merge(output, state.apply(update, 1.0)[0])
    assert output.finished
    assert [
        (o.index, o.text, len(o.token_ids), o.cumulative_logprob, o.finish_reason, o.stop_reason)
        for o in output.outputs
    ] == [
        (0, "ab", 3, -1.5, STOP, None),
        (1, "b", 2, -2.5, STOP, 257),
        (2, "bbb", 3, -3.5, LENGTH, None),
    ]
    assert (output.num_cached_tokens, output.num_discarded_tokens) == (2, 0)
    record = state.record(2.0)
    assert (record.prefill_s, record.decode_s) == (None, None)
    assert (record.queue_s, record.inference_s) == (0.5, 0.5)
    assert record.num_generation_tokens == 8


def test_the_end_id_s_text_may_be_kept(start: Any, tokenizer: Tokenizer) -> None:
    state = start(
        n=3, use_beam_search=True, include_stop_str_in_output=True, skip_special_tokens=False
    )
    output, _ = state.apply(beams(tokenizer)[0], 1.0)
    assert output.outputs[0].text == "ab" + tokenizer.decode([END_ID], False)


def test_an_error_of_one_beam_is_that_of_the_search(start: Any) -> None:
    state = start(n=3, use_beam_search=True)
    output, stopped = state.apply(SequenceUpdate("r", 0, (), ERROR, error="not finite"), 1.0)
    assert [o.finish_reason for o in output.outputs] == [ERROR] * 3
    assert (output.finished, output.error, stopped) == (True, "not finite", ())


def test_merging_keeps_what_came_once(start: Any, token: Any) -> None:
    state = start(n=1)
    output, _ = state.apply(token(0, "a", -1.0, num_cached_tokens=2), 1.0)
    merge(output, state.apply(token(0, "b", -1.0, LENGTH), 1.0)[0])
    assert output.num_cached_tokens == 2
    assert output.outputs[0].text == "ab"
