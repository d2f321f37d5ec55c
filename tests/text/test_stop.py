from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.text.stop import StopMatcher


def run(matcher: StopMatcher, chunks: list[str]) -> tuple[str, str | None]:
    out = []
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        out.append(text)
        if matched is not None:
            return "".join(out), matched
    return "".join(out) + matcher.flush(), None


def first_match(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """The oracle: for each end in turn, the longest stop string that ends there."""
    for end in range(len(text) + 1):
        ending = [one for one in stop if text[:end].endswith(one)]
        if ending:
            return end, max(ending, key=len)
    return None


@pytest.mark.parametrize(
    ("stop", "chunks", "expected"),
    [
        (("END",), ["text E", "N", "D more"], ("text ", "END")),
        (("END",), ["text E", "N", "X"], ("text ENX", None)),
        (("END",), ["text EN"], ("text EN", None)),
        (("aab",), ["aaab"], ("a", "aab")),
        (("abab!",), ["abababab!"], ("abab", "abab!")),
        (("b", "abc"), ["xabc"], ("xa", "b")),
        (("bc", "abc"), ["xabc"], ("x", "abc")),
        (("ab", "abc"), ["xabc"], ("x", "ab")),
        (("\n\n", "."), ["one\n", "\ntwo."], ("one", "\n\n")),
        (("🌶",), ["hot 🌶 hot"], ("hot ", "🌶")),
        ((), ["anything"], ("anything", None)),
    ],
)
def test_table(stop: tuple[str, ...], chunks: list[str], expected: tuple[str, str | None]) -> None:
    assert run(StopMatcher(stop, False), chunks) == expected


def test_the_stop_string_can_be_kept() -> None:
    assert run(StopMatcher(("END",), True), ["text E", "ND more"]) == ("text END", "END")


def test_held_text_is_given_back_when_nothing_more_comes() -> None:
    matcher = StopMatcher(("ing\u241fnever",), False)
    assert matcher.push("streaming") == ("stream", None)
    assert matcher.flush() == "ing"
    assert matcher.flush() == ""


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(("x",), False)
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("c") == ("", "x")
    assert matcher.flush() == ""


stops = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(stop=stops, chunks=st.lists(st.text("abcd", max_size=6), max_size=8), include=st.booleans())
def test_equals_the_oracle_however_the_text_is_cut(
    stop: tuple[str, ...], chunks: list[str], include: bool
) -> None:
    text, found = "".join(chunks), first_match("".join(chunks), stop)
    if found is None:
        expected: tuple[str, str | None] = (text, None)
    else:
        end, matched = found
        expected = (text[: end if include else end - len(matched)], matched)
    assert run(StopMatcher(stop, include), chunks) == expected


@settings(max_examples=150, deadline=None)
@given(stop=stops, chunks=st.lists(st.text("abcd", max_size=6), max_size=8))
def test_holds_back_no_more_than_a_beginning_of_a_stop_string(
    stop: tuple[str, ...], chunks: list[str]
) -> None:
    matcher, given_out, seen = StopMatcher(stop, False), "", ""
    for chunk in chunks:
        seen += chunk
        text, matched = matcher.push(chunk)
        given_out += text
        if matched is not None:
            return
        ends = [seen[at:] for at in range(len(seen) + 1)]
        held = next(end for end in ends if not end or any(one.startswith(end) for one in stop))
        assert seen == given_out + held


def test_hostile_stop_strings_cost_linear_time() -> None:
    stop = tuple("a" * 1023 + last for last in "bcde")
    matcher = StopMatcher(stop, False)
    start = time.perf_counter()
    for _ in range(20_000):
        matcher.push("aaaaa")
    assert time.perf_counter() - start < 2.0
    assert matcher.flush() == "a" * 1023
