"""Tokens that may not be chosen, and prompts that are cut: through the whole engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.api import ChatPrompt, GenerationRequest, TextPrompt, TokensPrompt
from octavo.engine.errors import InvalidRequestError

DRAWN = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True, seed=4)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), check_invariants=True, num_gpu_blocks_override=60) as llm:
        yield llm


def drawn(llm: LLM, **params: Any) -> list[list[int]]:
    outputs = llm.generate(["ab", "c"], DRAWN.with_changes(**params), use_tqdm=False)
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"temperature": 0.0}, {"presence_penalty": 2.0}])
def test_no_other_token_than_the_allowed(llm: LLM, more: dict[str, Any]) -> None:
    allowed = (7, 70, 99, 7)
    for token_ids in drawn(llm, allowed_token_ids=allowed, **more):
        assert len(token_ids) == 60
        assert set(token_ids) <= set(allowed)


def test_a_beam_search_keeps_to_the_allowed(llm: LLM) -> None:
    params = SamplingParams(
        n=3, use_beam_search=True, max_tokens=6, allowed_token_ids=(5, 6), ignore_eos=True
    )
    (output,) = llm.generate(["ab"], params, use_tqdm=False)
    assert [set(choice.token_ids) <= {5, 6} for choice in output.outputs] == [True] * 3


def test_bad_words_never_come(llm: LLM) -> None:
    encode = llm.get_tokenizer().encode
    letters = encode("abc ")
    free = drawn(llm, allowed_token_ids=tuple(letters), n=2)
    assert any("ab" in llm.get_tokenizer().decode(ids) for ids in free)
    for token_ids in drawn(llm, allowed_token_ids=tuple(letters), bad_words=("ab", "c"), n=2):
        text = llm.get_tokenizer().decode(token_ids)
        assert len(text) == 60
        assert "ab" not in text
        assert "c" not in text
        assert "a" in text


def test_bad_words_hold_over_preemption(tiny_model: Path, llm: LLM) -> None:
    letters = tuple(llm.get_tokenizer().encode("abc"))
    params = DRAWN.with_changes(allowed_token_ids=letters, bad_words=("abc", "ba"))
    prompts = [f"{i} " * 9 for i in range(8)]
    roomy = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(tiny_model), num_gpu_blocks_override=12, preemption_mode="recompute") as small:
        tight = [o.outputs[0].token_ids for o in small.generate(prompts, params, use_tqdm=False)]
        assert small.stats().num_preemptions > 0
    assert tight == roomy


def test_log_probabilities_are_those_before_the_masks(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    (free,) = llm.generate(["ab"], params, use_tqdm=False)
    entry = (free.outputs[0].logprobs or [])[0]
    best, second, *_ = entry
    (bound,) = llm.generate(
        ["ab"], params.with_changes(allowed_token_ids=(second,)), use_tqdm=False
    )
    assert bound.outputs[0].token_ids == [second]
    assert (bound.outputs[0].logprobs or [])[0][second] == entry[second]
    assert (bound.outputs[0].logprobs or [])[0][best] == entry[best]


def test_masks_that_leave_nothing_are_an_error_of_their_row(llm: LLM) -> None:
    letter = llm.get_tokenizer().encode("a")
    params = [
        DRAWN.with_changes(allowed_token_ids=tuple(letter), bad_words=("a",)),
        DRAWN.with_changes(allowed_token_ids=tuple(letter)),
    ]
    bad, good = llm.generate(["x", "y"], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "leave no token" in (bad.error or "")
    assert good.outputs[0].text == "a" * 60


def test_ids_outside_the_vocabulary_and_too_many_words(llm: LLM) -> None:
    for wrong, param in (
        ({"allowed_token_ids": (1, 259)}, "allowed_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": tuple(f"w{i}" for i in range(100))}, "bad_words"),
        ({"bad_words": ("a", "  ")}, "bad_words"),
    ):
        with pytest.raises(InvalidRequestError) as refusal:
            drawn(llm, **wrong)
        assert refusal.value.param == param


def admit(llm: LLM, prompt: Any, **fields: Any) -> Any:
    max_tokens = fields.pop("max_tokens", 4)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = GenerationRequest("r", prompt, sampling, time.monotonic(), **fields)
    return llm._admission.admit(request)


def test_long_prompts_are_cut_to_what_is_wanted(llm: LLM) -> None:
    encode = llm.get_tokenizer().encode
    text = "0123456789" * 400
    for prompt in (TextPrompt(text), TokensPrompt(encode(text))):
        for most, start, expected in (
            (10, False, text[-10:]),
            (10, True, text[:10]),
            (-1, False, text[-508:]),
        ):
            fields = {"max_prompt_tokens": most, "keeps_prompt_start": start, "echo": True}
            found = admit(llm, prompt, **fields)
            assert found.new.prompt_token_ids == encode(expected)
            assert found.prompt == expected
            assert found.new.sampling.max_tokens == 4
    found = admit(llm, TextPrompt("short"), max_prompt_tokens=10, echo=True)
    assert found.prompt == "short"
    chat = ChatPrompt([{"role": "user", "content": text}])
    found = admit(llm, chat, max_prompt_tokens=20, max_tokens=None)
    assert len(found.new.prompt_token_ids) == 20
    assert len(admit(llm, chat, max_prompt_tokens=-1, max_tokens=None).new.prompt_token_ids) == 511
    for most in (0, -2, 513):
        with pytest.raises(InvalidRequestError) as refusal:
            admit(llm, TextPrompt("x"), max_prompt_tokens=most)
        assert refusal.value.param == "truncate_prompt_tokens"
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        admit(llm, TextPrompt(text), max_prompt_tokens=512)
