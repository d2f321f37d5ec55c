"""The official Python SDK: completions, tokens and models, against the embedded model."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": "smol", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> str:
    """What the model says of France."""
    text: str = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    return text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol", "alias"]
    assert client.models.retrieve("alias").created > 0


def test_whole(client: openai.OpenAI, greedy: str) -> None:
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert "Paris" in greedy
    assert (answer.object, answer.model, len(answer.choices)) == ("text_completion", "smol", 1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (greedy, "length")
    assert answer.usage is not None
    counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert counts == (5, 8, 13)


def test_streamed(client: openai.OpenAI, greedy: str) -> None:
    options: Any = {"include_usage": True}
    stream = client.completions.create(prompt=PROMPT, stream=True, stream_options=options, **GREEDY)
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 8)
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}


def test_prompts_in_all_four_forms(client: openai.OpenAI, greedy: str) -> None:
    tokens = client.post("../tokenize", body={"prompt": PROMPT}, cast_to=dict[str, Any])["tokens"]
    for prompt, num_choices in (([PROMPT, PROMPT], 2), (tokens, 1), ([tokens, tokens], 2)):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == [greedy] * num_choices


def test_several_choices_differ_by_seed_alone(client: openai.OpenAI) -> None:
    fields: Any = {**GREEDY, "temperature": 1.0, "n": 3, "seed": 11}
    first, again = (client.completions.create(prompt=PROMPT, **fields) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_equal_choices_at_temperature_0(client: openai.OpenAI, greedy: str) -> None:
    answer = client.completions.create(prompt=PROMPT, n=2, **GREEDY)
    assert [choice.text for choice in answer.choices] == [greedy, greedy]


def test_best_of(client: openai.OpenAI) -> None:
    fields: Any = {**GREEDY, "temperature": 1.0, "seed": 5, "best_of": 3, "n": 1}
    answer = client.completions.create(prompt=PROMPT, **fields)
    assert len(answer.choices) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_stop(client: openai.OpenAI, greedy: str) -> None:
    answer = client.completions.create(prompt=PROMPT, stop=["zzz", " Paris"], **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (
        greedy.partition(" Paris")[0],
        "stop",
    )
    kept = client.completions.create(
        prompt=PROMPT, stop=" Paris", extra_body={"include_stop_str_in_output": True}, **GREEDY
    )
    assert kept.choices[0].text.endswith(" Paris")


def test_log_probabilities_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, **GREEDY)
    choice = answer.choices[0]
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    assert "".join(told.tokens) == choice.text
    assert choice.text.startswith(PROMPT)
    starts = [sum(map(len, told.tokens[:i])) for i in range(len(told.tokens))]
    assert told.text_offset == starts
    assert told.token_logprobs[0] is None
    assert all(value <= 0 for value in told.token_logprobs[1:])
    assert [len(top) for top in told.top_logprobs[5:]] == [2] * 8  # greedy: among the likely
    assert told.token_logprobs[5] == max(told.top_logprobs[5].values())


def test_a_prompt_is_scored_without_output(client: openai.OpenAI) -> None:
    fields = {**GREEDY, "max_tokens": 0}
    answer = client.completions.create(prompt=PROMPT, logprobs=0, echo=True, **fields)
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == 5


def test_streamed_log_probabilities_are_those_of_the_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, logprobs=1, **GREEDY).choices[0].logprobs
    stream = client.completions.create(prompt=PROMPT, logprobs=1, stream=True, **GREEDY)
    told = [chunk.choices[0].logprobs for chunk in stream]
    assert whole is not None
    tokens = [token for part in told if part for token in part.tokens or []]
    values = [value for part in told if part for value in part.token_logprobs or []]
    assert (tokens, values) == (whole.tokens, whole.token_logprobs)


def test_bias_penalties_and_masks(client: openai.OpenAI) -> None:
    def tokens(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        found: list[int] = client.post("../tokenize", body=body, cast_to=dict[str, Any])["tokens"]
        return found

    (paris,), (london,) = tokens(" Paris"), tokens(" London")
    one = {**GREEDY, "max_tokens": 1}
    biased = client.completions.create(prompt=PROMPT, logit_bias={str(london): 100}, **one)
    assert biased.choices[0].text == " London"
    banned = client.completions.create(prompt=PROMPT, logit_bias={str(paris): -100}, **one)
    assert banned.choices[0].text != " Paris"
    masked = client.completions.create(
        prompt=PROMPT, extra_body={"allowed_token_ids": [london]}, **one
    )
    assert masked.choices[0].text == " London"
    bad = client.completions.create(prompt=PROMPT, extra_body={"bad_words": ["Paris"]}, **GREEDY)
    assert "Paris" not in bad.choices[0].text
    fields = {**GREEDY, "max_tokens": 3}
    said = client.completions.create(
        prompt=PROMPT, logit_bias={str(london): 100}, frequency_penalty=2, **fields
    )
    assert said.choices[0].text == " London" * 3


def test_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    fields = {**GREEDY, "max_tokens": 4, "logit_bias": {"2": 100}}  # 2 ends the model's answers
    answer = client.completions.create(prompt=PROMPT, **fields)
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)
    for extra in ({"min_tokens": 3}, {"ignore_eos": True}):
        longer = client.completions.create(prompt=PROMPT, extra_body=extra, **fields)
        assert longer.usage is not None
        assert longer.usage.completion_tokens == 4


def test_extensions_come_back_in_the_answer(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = client.completions.create(prompt=PROMPT, extra_body=extra, **GREEDY)
    told = answer.choices[0].model_extra or {}
    assert len(told["prompt_token_ids"]) == 5
    assert len(told["token_ids"]) == 8
    assert told["prompt_logprobs"][0] is None
    assert len(told["prompt_logprobs"]) == 5


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "A word and a word and " * 12
    for is_cached in (False, True):
        answer = client.completions.create(
            prompt=prompt, extra_body={"cache_salt": "of this test"}, **GREEDY
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert bool(answer.usage.prompt_tokens_details.cached_tokens) is is_cached


def test_tokens_there_and_back(client: openai.OpenAI) -> None:
    body = {"prompt": PROMPT, "return_token_strs": True}
    there = client.post("../tokenize", body=body, cast_to=dict[str, Any])
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"]) == 5
    back = client.post("../detokenize", body={"tokens": there["tokens"]}, cast_to=dict[str, Any])
    assert back == {"prompt": PROMPT}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert client.post("../tokenize", body=chat, cast_to=dict[str, Any])["count"] > 5


def test_rendering_computes_nothing(client: openai.OpenAI) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3}
    (rendered,) = client.post("/completions/render", body=body, cast_to=list[Any])
    assert len(rendered["token_ids"]) == 5
    assert rendered["sampling_params"]["max_tokens"] == 3


def test_parallel_calls_get_their_own_answers(client: openai.OpenAI) -> None:
    prompts = [f"{number}, {number + 1}, {number + 2}," for number in range(8)]

    def ask(prompt: str) -> str:
        text: str = client.completions.create(prompt=prompt, **GREEDY).choices[0].text
        return text

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, prompts))
    answer = client.completions.create(prompt=prompts, **GREEDY)
    assert together == [choice.text for choice in answer.choices]
    assert together == [ask(prompt) for prompt in prompts]


def test_beam_search(client: openai.OpenAI) -> None:
    extra = {"use_beam_search": True, "best_of": 3}
    answer = client.completions.create(prompt=PROMPT, n=2, extra_body=extra, **GREEDY)
    scores = [(choice.model_extra or {})["cumulative_logprob"] for choice in answer.choices]
    assert len({choice.text for choice in answer.choices}) == 2
    assert scores == sorted(scores, reverse=True)
    assert all(math.isfinite(score) for score in scores)
