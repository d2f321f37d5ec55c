from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.text.detokenizer import Detokenizer
from octavo.engine.text.pieces import REPLACEMENT
from octavo.engine.text.tokenizer import Tokenizer

shared = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def in_chunks(token_ids: list[int], cuts: list[int]) -> Iterator[list[int]]:
    edges = [0, *sorted(cuts), len(token_ids)]
    for start, end in pairwise(edges):
        yield token_ids[start:end]


def stream(detokenizer: Detokenizer, chunks: Iterator[list[int]]) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


@pytest.mark.model
def test_a_character_of_several_tokens_comes_whole(smollm: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm)
    assert [detokenizer.push_one(token_id) for token_id in (10813, 230, 131)] == ["", "", "🌶"]
    assert detokenizer.finish() == ""


@pytest.mark.model
def test_bytes_left_over_become_the_marks_of_a_full_decode(smollm: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm)
    deltas = [detokenizer.push([10813]) for _ in range(3)]
    text = "".join(deltas) + detokenizer.finish()
    assert text == b"\xf0\x9f\xf0\x9f\xf0\x9f".decode("utf-8", "replace")
    assert text == smollm.decode([10813] * 3) == REPLACEMENT * 3


@pytest.mark.parametrize("skips", [True, False])
def test_joined_deltas_equal_a_full_decode(any_tokenizer: Tokenizer, skips: bool) -> None:
    rng = random.Random(13)
    for _ in range(500):
        num_tokens, most = rng.randrange(40), rng.choice([258, any_tokenizer.vocab_size + 2])
        token_ids = [rng.randrange(most + 1) for _ in range(num_tokens)]
        cuts = [rng.randrange(num_tokens + 1) for _ in range(rng.randrange(num_tokens + 1))]
        detokenizer = Detokenizer(any_tokenizer, skip_special_tokens=skips)
        deltas = stream(detokenizer, in_chunks(token_ids, cuts))
        assert "".join(deltas) == any_tokenizer.decode(token_ids, skips), token_ids
        assert all(delta.encode().decode() == delta for delta in deltas)


@pytest.mark.model
@shared
@given(token_ids=st.lists(st.integers(0, 49151), max_size=40), skips=st.booleans())
def test_joined_deltas_equal_the_librarys_decode_byte_level(
    smollm: Tokenizer, token_ids: list[int], skips: bool
) -> None:
    deltas = stream(Detokenizer(smollm, skip_special_tokens=skips), iter([[i] for i in token_ids]))
    assert "".join(deltas) == smollm._backend.decode(token_ids, skip_special_tokens=skips)


@shared
@given(token_ids=st.lists(st.integers(0, 310), max_size=30), skips=st.booleans())
def test_joined_deltas_equal_the_librarys_decode_sentencepiece(
    sentencepiece: Tokenizer, token_ids: list[int], skips: bool
) -> None:
    """Where a run of byte tokens is broken as a whole, the library marks its whole characters too;
    SentencePiece, which octavo follows, keeps them. So such runs are made of stray bytes only."""
    stray = [
        3 + 0x80 + token_id % 0x40 if 3 <= token_id < 259 else token_id for token_id in token_ids
    ]
    deltas = stream(
        Detokenizer(sentencepiece, skip_special_tokens=skips), iter([[i] for i in stray])
    )
    assert "".join(deltas) == sentencepiece._backend.decode(stray, skip_special_tokens=skips)


@shared
@given(text=st.text(max_size=30))
def test_no_mark_for_bytes_that_become_a_character(any_tokenizer: Tokenizer, text: str) -> None:
    token_ids = any_tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(any_tokenizer, skip_special_tokens=False)
    deltas = [detokenizer.push_one(token_id) for token_id in token_ids]
    assert detokenizer.finish() == ""
    assert "".join(deltas) == text
    assert all(REPLACEMENT not in delta or REPLACEMENT in text for delta in deltas)


def test_sentencepiece_keeps_valid_characters_of_a_broken_run(sentencepiece: Tokenizer) -> None:
    token_ids = [3 + byte for byte in b"a\xe4\xbdb\xff"]
    assert sentencepiece.decode(token_ids) == "a" + 2 * REPLACEMENT + "b" + REPLACEMENT
    detokenizer = Detokenizer(sentencepiece)
    assert [detokenizer.push_one(i) for i in token_ids] == [
        "a",
        "",
        "",
        2 * REPLACEMENT + "b",
        REPLACEMENT,
    ]


def test_sentencepiece_drops_only_the_first_space(sentencepiece: Tokenizer) -> None:
    the, a = sentencepiece.encode("the a", add_special_tokens=False)
    detokenizer = Detokenizer(sentencepiece)
    assert [detokenizer.push([i]) for i in (1, the, a, the)] == ["", "the", " a", " the"]


def test_a_continuation_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    (the,) = sentencepiece.encode("the", add_special_tokens=False)
    assert Detokenizer(sentencepiece, keep_leading_space=True).push([the]) == " the"


def test_special_tokens_show_only_if_wanted(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a<|end|>b<think>")
    assert Detokenizer(byte_level).push(token_ids) == "ab<think>"
    assert Detokenizer(byte_level, skip_special_tokens=False).push(token_ids) == "a<|end|>b<think>"


def test_a_skipped_token_does_not_break_a_character(sentencepiece: Tokenizer) -> None:
    first, second = (3 + byte for byte in "é".encode())
    detokenizer = Detokenizer(sentencepiece)
    assert [detokenizer.push([i]) for i in (first, 1, second)] == ["", "", "é"]


def test_ids_without_a_token_have_no_text(any_tokenizer: Tokenizer) -> None:
    assert Detokenizer(any_tokenizer).push([any_tokenizer.vocab_size, 10**6]) == ""
