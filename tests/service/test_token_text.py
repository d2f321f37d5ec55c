"""Tokens come with the last of their text, each once, whatever is held back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.api import CompletionOutput, FinishReason, SamplingParams
from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.scheduling.request import NewRequest, SequenceUpdate
from octavo.engine.service.admission import Admitted
from octavo.engine.service.output import RequestState
from octavo.engine.step import SampleLogprobs
from octavo.engine.text.tokenizer import Tokenizer, load_tokenizer

END = 256  # a special token of the tiny model, whose other tokens are one byte each


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(tiny_model))


def deltas(
    tokenizer: Tokenizer, token_ids: list[int], reason: FinishReason, **params: Any
) -> list[CompletionOutput]:
    """What a stream gets of these tokens, one a step, until it ends."""
    sampling = SamplingParams(max_tokens=len(token_ids), logprobs=0, **params)
    new = NewRequest("r", [1], sampling, 1, 0.0)
    state = RequestState(Admitted(new, "a", {}, True, False, True), tokenizer)
    found: list[CompletionOutput] = []
    for index, token_id in enumerate(token_ids):
        is_last = index == len(token_ids) - 1
        logprobs = (SampleLogprobs(-float(index), 1, ()),)
        update = SequenceUpdate("r", 0, (token_id,), reason if is_last else None, logprobs=logprobs)
        output, _ = state.apply(update, 1.0)
        found += output.outputs
        if output.finished:
            break
    return found


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_character_of_several_tokens_brings_them_all(tokenizer: Tokenizer) -> None:
    found = deltas(tokenizer, ids(tokenizer, "a🌶b"), FinishReason.LENGTH)
    assert [(one.text, len(one.token_ids)) for one in found] == [
        ("a", 1), ("", 0), ("", 0), ("", 0), ("🌶", 4), ("b", 1),
    ]  # fmt: skip
    assert [offset for one in found for offset in one.text_offsets or ()] == [0, 1, 1, 1, 1, 2]


def test_a_held_stop_string_holds_its_tokens(tokenizer: Tokenizer) -> None:
    found = deltas(tokenizer, ids(tokenizer, "aSTOx"), FinishReason.LENGTH, stop=("STOP",))
    assert [(one.text, len(one.token_ids)) for one in found] == [
        ("a", 1), ("", 0), ("", 0), ("", 0), ("STOx", 4),
    ]  # fmt: skip
    assert [next(iter(e.values())).logprob for one in found for e in one.logprobs or ()] == [
        0.0, -1.0, -2.0, -3.0, -4.0,
    ]  # fmt: skip


@pytest.mark.parametrize(("included", "text", "num_cut"), [(False, "ab", 4), (True, "abSTOP", 0)])
def test_tokens_of_a_stop_string_are_cut_with_it(
    tokenizer: Tokenizer, included: bool, text: str, num_cut: int
) -> None:
    found = deltas(
        tokenizer,
        ids(tokenizer, "abSTOPc"),
        FinishReason.LENGTH,
        stop=("STOP",),
        include_stop_str_in_output=included,
    )
    assert "".join(one.text for one in found) == text
    assert [one.num_cut_tokens for one in found[:-1]] == [0] * (len(found) - 1)
    assert found[-1].num_cut_tokens == num_cut
    assert sum(len(one.token_ids) for one in found) == 6  # usage counts them all


def test_an_end_id_is_reported_and_has_no_text(tokenizer: Tokenizer) -> None:
    found = deltas(tokenizer, [*ids(tokenizer, "a"), END], FinishReason.STOP)
    assert [(one.text, one.token_ids, one.num_cut_tokens) for one in found] == [
        ("a", ids(tokenizer, "a"), 0), ("", [END], 0),
    ]  # fmt: skip
    assert found[-1].text_offsets == [1]


def test_a_held_character_holds_all_of_its_tokens(tokenizer: Tokenizer) -> None:
    found = deltas(tokenizer, ids(tokenizer, "aéb"), FinishReason.LENGTH, stop=("é!",))
    assert [(one.text, len(one.token_ids)) for one in found] == [
        ("a", 1), ("", 0), ("", 0), ("éb", 3),
    ]  # fmt: skip


def test_bytes_that_never_become_a_character(tokenizer: Tokenizer) -> None:
    whole = ids(tokenizer, "🌶")
    found = deltas(tokenizer, [*whole[:2], *ids(tokenizer, "a"), *whole[:3]], FinishReason.LENGTH)
    assert "".join(one.text for one in found) == "\ufffda\ufffd"
    assert [one.token_ids for one in found if one.text] == [
        [*whole[:2], *ids(tokenizer, "a")], whole[:3],
    ]  # fmt: skip
    assert [offset for one in found for offset in one.text_offsets or ()] == [0, 0, 0, 2, 2, 2]


@given(
    text=st.text(alphabet="ab🌶é\n", max_size=12),
    stop=st.lists(st.text(alphabet="ab🌶é", min_size=1, max_size=4), max_size=3),
    included=st.booleans(),
    ends=st.booleans(),
    specials=st.sets(st.integers(0, 12), max_size=2),
    cut=st.integers(0, 3),
)
def test_any_tokens_come_once_in_order_with_their_text(
    tokenizer: Tokenizer,
    text: str,
    stop: list[str],
    included: bool,
    ends: bool,
    specials: set[int],
    cut: int,
) -> None:
    token_ids = ids(tokenizer, text)
    token_ids = token_ids[: len(token_ids) - cut] or [5]
    for place in specials:
        token_ids.insert(place, 257)
    if ends:
        token_ids.append(END)
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    found = deltas(
        tokenizer, token_ids, reason, stop=tuple(stop), include_stop_str_in_output=included
    )
    given_ids = [token_id for one in found for token_id in one.token_ids]
    assert given_ids == token_ids[: len(given_ids)]
    entries = [entry for one in found for entry in one.logprobs or ()]
    assert [next(iter(entry)) for entry in entries] == given_ids
    assert [next(iter(e.values())).logprob for e in entries] == [
        -float(i) for i in range(len(entries))
    ]
    whole = "".join(one.text for one in found)
    offsets = [offset for one in found for offset in one.text_offsets or ()]
    assert offsets == sorted(offsets)
    num_kept = len(given_ids) - found[-1].num_cut_tokens
    assert all(offset <= len(whole) for offset in offsets[:num_kept])
    assert all(offset >= len(whole) for offset in offsets[num_kept:])
    num_chars = 0
    for one in found[:-1]:  # each token's own text is in the chunks up to its own
        num_chars += len(one.text)
        assert all(offset <= num_chars for offset in one.text_offsets or ())
