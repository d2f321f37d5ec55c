"""Known faults B: log-probabilities have one shape a route, belong to their text and are the model's own."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo import LLM, SamplingParams
from octavo.engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]
C, X = "/v1/completions", "/v1/chat/completions"
NUMBERS = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12. "
SUBJECTS = ["The capital of France is", "Water boils at", "def f(n):\n", "Roses are red,", NUMBERS]


def names_of(answer: Any) -> list[str]:
    """The tokens of a completion as ``token_id:N``, of an answer that was asked for them."""
    return [str(name) for name in answer["choices"][0]["logprobs"]["tokens"]]


def test_b01_each_route_has_its_own_shape(exact: Any) -> None:
    whole, chunks = exact.parity(C, prompt="Hello world", max_tokens=3, logprobs=2)
    found = whole["choices"][0]["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in found.values()} == {3}
    assert all(len(alternatives) in (2, 3) for alternatives in found["top_logprobs"])
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert len(told) > 1  # each chunk has the slice of its own tokens
    whole, chunks = exact.parity(X, max_tokens=3, logprobs=True, top_logprobs=2)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for one in content:
        assert set(one) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(top) for top in one["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
    assert sum(bool(c["choices"][0]["logprobs"]) for c in chunks) > 1


def test_b01_the_sdk_reads_both(exact: Any) -> None:
    with openai.OpenAI(base_url=f"{exact.url}/v1", api_key="none", max_retries=0) as client:
        legacy = client.completions.create(
            model="smol", prompt="Hello world", max_tokens=3, logprobs=2, temperature=0
        )
        chat = client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            logprobs=True,
            top_logprobs=2,
        )
    assert legacy.choices[0].logprobs is not None
    assert len(legacy.choices[0].logprobs.tokens or ()) == 3
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert [len(one.top_logprobs) for one in content] == [2, 2, 2]


@pytest.mark.parametrize("forced", [10813, 2])
def test_b03_every_candidate_is_decoded_by_itself(
    exact: Any, tokenizer: Tokenizer, forced: int
) -> None:
    ask: dict[str, Any] = {
        "logit_bias": {str(forced): 100}, "logprobs": True, "top_logprobs": 5, "max_tokens": 2,
        "ignore_eos": True,
    }  # fmt: skip
    content = exact.ask(X, **ask)["choices"][0]["logprobs"]["content"]
    named = exact.ask(X, **ask, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert len(content) == 2
    for one, name in zip(content, named["content"], strict=True):
        entries = [one, *one["top_logprobs"]]
        for entry, other in zip(entries, [name, *name["top_logprobs"]], strict=True):
            token_id = int(other["token"].removeprefix("token_id:"))
            assert bytes(entry["bytes"]) == tokenizer.token_bytes(token_id) != b""
            assert entry["token"] == tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        shown = [tuple(entry["bytes"]) for entry in one["top_logprobs"]]
        assert len(set(shown)) == 5
        assert bytes(one["bytes"]) == tokenizer.token_bytes(forced)
    if forced == 2:
        assert [one["token"] for one in content] == ["<|im_end|>"] * 2


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_b05_scoring_a_prompt(
    exact: Any, tokenizer: Tokenizer, logprobs_of: Any, max_tokens: int, as_ids: bool
) -> None:
    text = "Your answer: Yes"
    ids = tokenizer.encode(text)
    answer = exact.ask(
        C, prompt=ids if as_ids else text, echo=True, max_tokens=max_tokens, logprobs=1
    )
    choice, usage = answer["choices"][0], answer["usage"]
    assert usage["completion_tokens"] == max_tokens
    assert usage["prompt_tokens"] == len(ids)
    assert choice["text"].startswith(text)
    assert max_tokens or choice["text"] == text
    found = choice["logprobs"]
    assert {len(values) for values in found.values()} == {len(ids) + max_tokens}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    table = logprobs_of(ids)
    for position in range(1, len(ids)):
        expected = table[position - 1]
        assert abs(found["token_logprobs"][position] - expected[ids[position]].item()) < 1e-3
        assert abs(max(found["top_logprobs"][position].values()) - expected.max().item()) < 1e-3
    exact.audit()
    exact.canary()


def test_b08_tokens_come_with_their_text(exact: Any) -> None:
    ask: dict[str, Any] = {"prompt": "Count: 1 2 3", "max_tokens": 12, "logprobs": 1}
    whole, chunks = exact.parity(C, **ask, stop=["zzzz-never"])
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
    check_alignment(chunks)
    text = whole["choices"][0]["text"]
    for stop in (text[4:6], text[3:8], text[-2:]):
        cut, chunks = exact.parity(C, **ask, stop=[stop])
        choice = cut["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["text"] == text[: text.index(stop)]
        check_alignment(chunks)
        # the rule: a token is told unless all of its text was cut
        told, kept = choice["logprobs"], len(choice["text"])
        assert told["tokens"] == whole["choices"][0]["logprobs"]["tokens"][: len(told["tokens"])]
        assert all(offset < kept for offset in told["text_offset"])
        assert "".join(told["tokens"])[:kept] == choice["text"]


def check_alignment(chunks: list[Any]) -> None:
    """Each chunk's tokens end in its own text, the last one's end where it may be cut."""
    given = 0
    for chunk in chunks:
        part = chunk["choices"][0]
        before, given = given, given + len(part["text"])
        logprobs = part["logprobs"] or {"tokens": [], "text_offset": []}
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert before < offset + len(token)
            assert offset < given


def test_b10_zero_alternatives_are_not_off(exact: Any) -> None:
    ask: dict[str, Any] = {"max_tokens": 2}
    found = exact.ask(C, prompt="Hello world", **ask, logprobs=0)["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 2
    assert all(value < 0 for value in found["token_logprobs"])
    assert all(len(one or {}) <= 1 for one in found["top_logprobs"])
    content = exact.ask(X, **ask, logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]
    assert [one["top_logprobs"] for one in content["content"]] == [[], []]
    assert all(one["logprob"] < 0 for one in content["content"])
    for fields in ({"logprobs": False, "top_logprobs": 3}, {"top_logprobs": 2}):
        for stream in (False, True):
            refused = exact.send(X, **ask, **fields, stream=stream)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "top_logprobs"


def test_b11_a_cached_prompt_has_the_logprobs_of_a_cold_one(
    exact: Any, tokenizer: Tokenizer, logprobs_of: Any
) -> None:
    ids = tokenizer.encode(NUMBERS * 4)[:100]
    other = [*ids[:64], *tokenizer.encode("Paris is the capital of France.")]
    score: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "return_token_ids": True}
    exact.http.post("/reset_prefix_cache")
    cold = [exact.ask(C, prompt=one, **score)["choices"][0] for one in (ids, other)]
    exact.http.post("/reset_prefix_cache")
    assert exact.ask(C, prompt=ids, max_tokens=1)["usage"]["prompt_tokens"] == 100  # warms
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    before = [exact.metric(name) for name in names]
    for _ in range(2):
        for prompt, reference in zip((ids, other), cold, strict=True):
            choice = exact.ask(C, prompt=prompt, **score)["choices"][0]
            assert choice["token_ids"] == reference["token_ids"]
            told, first = choice["logprobs"], reference["logprobs"]
            for warm, expected in zip(
                told["token_logprobs"][1:], first["token_logprobs"][1:], strict=True
            ):
                assert abs(warm - expected) < 1e-4
            table = logprobs_of(prompt)
            for position in range(1, len(prompt)):
                exactly = table[position - 1][prompt[position]].item()
                assert abs(told["token_logprobs"][position] - exactly) < 1e-3
    assert [exact.metric(name) for name in names] == before  # no lookup, so no miss
    assert exact.ask(C, prompt=ids, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_logprobs_of_every_form_in_one_batch_equal_transformers(
    exact: Any, tokenizer: Tokenizer, logprobs_of: Any
) -> None:
    """Drawn, echoed and prompt log-probabilities, computed together, each as if it were alone."""
    forms: list[dict[str, Any]] = [
        {"logprobs": 3, "temperature": 1, "seed": 4, "n": 2},
        {"logprobs": 0, "presence_penalty": 2},
        {"logprobs": 2, "echo": True},
        {"prompt_logprobs": 2},
        {"logprobs": 1, "prompt_logprobs": 0, "echo": True, "temperature": 1, "seed": 9},
    ]
    asks = [
        {"prompt": SUBJECTS[(i + j) % 5], "max_tokens": 4 + j, "return_token_ids": True, **form}
        for i, form in enumerate(forms)
        for j in range(2)
    ]
    with concurrent.futures.ThreadPoolExecutor(len(asks)) as threads:
        answers = list(threads.map(lambda ask: exact.ask(C, **ask), asks))
    for ask, answer in zip(asks, answers, strict=True):
        for choice in answer["choices"]:
            check_choice(choice, ask, logprobs_of)
    exact.audit()


def check_choice(choice: Any, ask: dict[str, Any], logprobs_of: Callable[..., Any]) -> None:
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    table = logprobs_of(prompt + output)
    assert len(output) > 0
    if "logprobs" in ask:
        told = [*prompt, *output] if ask.get("echo") else output
        first = 0 if ask.get("echo") else len(prompt)
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) == len(told)
        for position, (token_id, value) in enumerate(zip(told, values, strict=True), start=first):
            if position:
                assert abs(value - table[position - 1][token_id].item()) < 1e-3
    if "prompt_logprobs" in ask:
        entries = choice["prompt_logprobs"]
        assert len(entries) == len(prompt)
        for position, entry in enumerate(entries[1:], start=1):
            assert str(prompt[position]) in entry
            for token_id, one in entry.items():
                assert abs(one["logprob"] - table[position - 1][int(token_id)].item()) < 1e-3


def test_logprobs_of_llm_equal_transformers_alone_and_together(
    model_path: Path, tokenizer: Tokenizer, logprobs_of: Callable[..., Any]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    ids = [tokenizer.encode(text) for text in SUBJECTS]
    with LLM(str(model_path), dtype="float32", max_num_batched_tokens=16, max_num_seqs=8) as llm:
        together = llm.generate(ids, params, use_tqdm=False)
        alone = llm.generate(ids[0], params, use_tqdm=False)
    for output in (*together, *alone):
        (one,) = output.outputs
        prompt = list(output.prompt_token_ids)
        table = logprobs_of(prompt + one.token_ids)
        told = [*(output.prompt_logprobs or ()), *(one.logprobs or ())]
        assert told[0] is None
        assert len(told) == len(prompt) + 5
        for position, entry in enumerate(told[1:], start=1):
            assert (prompt + one.token_ids)[position] in (entry or {})
            for token_id, logprob in (entry or {}).items():
                assert abs(logprob.logprob - table[position - 1][token_id].item()) < 1e-3
    assert together[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
