"""Log-probabilities over HTTP with the embedded model, against transformers in float32; streams against wholes."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]
C, X = "/v1/completions", "/v1/chat/completions"
PEPPER = [10813, 230, 131]  # the three tokens of one character
LONG = "The capital of France is Paris. 1, 2, 3, 4, 5, 6. " * 5


@pytest.fixture(scope="module")
def exact(model_path: Path, start_server: Callable[..., Any]) -> Iterator[Any]:
    """A server in float32, whose prompts of more than 24 tokens are computed in chunks."""
    flags = ("--dtype", "float32", "--check-invariants", "--max-num-batched-tokens", "24")
    with start_server(*flags, "--max-num-seqs", "8") as running:
        yield running


@pytest.fixture(scope="module")
def post(exact: Any) -> Callable[..., Any]:
    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(exact.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


@pytest.fixture(scope="module")
def stream(exact: Any) -> Callable[..., list[Any]]:
    def stream(path: str, **body: Any) -> list[Any]:
        answer = httpx.post(exact.url + path, json={**body, "stream": True}, timeout=120)
        assert answer.status_code == 200, answer.text
        events = [part[6:] for part in answer.text.split("\n\n") if part]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    return stream


@pytest.fixture(scope="module")
def logprobs_of(oracle: Any) -> Callable[[list[int]], Any]:
    """Token ids → ``[len, vocab]`` float32: row i has the log-probabilities of what follows token i."""
    import torch

    def logprobs(token_ids: list[int]) -> Any:
        with torch.inference_mode():
            return torch.log_softmax(oracle(torch.tensor([token_ids])).logits[0], dim=-1)

    return logprobs


def check(choice: Any, logprobs_of: Any, tokenizer: Tokenizer, num_top: int, *, echo: bool) -> None:
    """A completion's lists against the oracle. Needs token ids in the answer."""
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    table = logprobs_of(prompt + output)
    told = prompt + output if echo else output
    first = 0 if echo else len(prompt)
    found = choice["logprobs"]
    assert {len(values) for values in found.values()} == {len(told)}
    for i, token_id in enumerate(told):
        name = tokenizer.token_bytes(token_id)
        if first + i == 0:
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            continue
        row = table[first + i - 1]
        assert abs(found["token_logprobs"][i] - row[token_id].item()) < 1e-3
        best = row.topk(num_top).values.tolist() if num_top else []
        top = sorted(found["top_logprobs"][i].values(), reverse=True)
        assert num_top <= len(top) <= num_top + 1
        assert all(abs(a - b) < 1e-3 for a, b in zip(top, best, strict=False))
        try:
            assert found["tokens"][i] == name.decode()
            begin = found["text_offset"][i]
            if token_id not in tokenizer.special_token_ids:
                assert choice["text"][begin : begin + len(name.decode())] == name.decode()
        except UnicodeDecodeError:
            assert found["tokens"][i].startswith("bytes:\\x")


def test_scoring_alone_in_chunks_cached_and_in_company(
    exact: Any, post: Any, logprobs_of: Any, tokenizer: Tokenizer
) -> None:
    """B05, B11."""
    ask: dict[str, Any] = {"echo": True, "logprobs": 3, "return_token_ids": True, "temperature": 0}
    queries = exact.metric("vllm:prefix_cache_queries_total")
    cold = post(C, prompt=LONG, max_tokens=0, **ask)
    assert cold["choices"][0]["text"] == LONG
    assert cold["usage"]["completion_tokens"] == 0
    assert len(cold["choices"][0]["token_ids"]) == 0
    for body in (
        {"prompt": LONG, "max_tokens": 0},
        {"prompt": LONG, "max_tokens": 3},
        {"prompt": [*tokenizer.encode(LONG)[:64], 905], "max_tokens": 1},
        {"prompt": ["Your answer: Yes", "🌶 pepper", "x y"], "max_tokens": 2, "n": 2, "seed": 1,
         "temperature": 1},
    ):  # fmt: skip
        answer = post(C, **{**ask, **body})
        for choice in answer["choices"]:
            check(choice, logprobs_of, tokenizer, 3, echo=True)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert exact.metric("vllm:prefix_cache_queries_total") == queries
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for answer in pool.map(lambda i: post(C, prompt=LONG[i:], max_tokens=i, **ask), range(6)):
            check(answer["choices"][0], logprobs_of, tokenizer, 3, echo=True)
    again = post(C, prompt=LONG, max_tokens=0, **ask)
    assert again["choices"] == cold["choices"]
    exact.wait_idle()


def test_drawn_tokens_in_both_shapes(post: Any, logprobs_of: Any, tokenizer: Tokenizer) -> None:
    """B01, B03: raw, whatever penalties and bias do to the drawing."""
    for changes in (
        {},
        {"presence_penalty": 2, "temperature": 0.3},
        {"logit_bias": {"10813": 100}},
    ):
        ask = {"max_tokens": 6, "seed": 5, "return_token_ids": True, **changes}
        for choice in post(C, prompt="Count: 1 2 3", logprobs=5, n=2, **ask)["choices"]:
            check(choice, logprobs_of, tokenizer, 5, echo=False)
        messages = [{"role": "user", "content": "Repeat: 🌶"}]
        answer = post(X, messages=messages, logprobs=True, top_logprobs=5, **ask)
        (choice,) = answer["choices"]
        ids, prompt = choice["token_ids"], answer["prompt_token_ids"]
        table = logprobs_of(prompt + ids)[len(prompt) - 1 : -1]
        assert len(choice["logprobs"]["content"]) == len(ids)
        for one, token_id, row in zip(choice["logprobs"]["content"], ids, table, strict=True):
            assert abs(one["logprob"] - row[token_id].item()) < 1e-3
            assert bytes(one["bytes"]) == tokenizer.token_bytes(token_id)
            values, best = row.topk(5)
            assert [bytes(t["bytes"]) for t in one["top_logprobs"]] == [
                tokenizer.token_bytes(i) for i in best.tolist()
            ]
            for top, value in zip(one["top_logprobs"], values.tolist(), strict=True):
                assert abs(top["logprob"] - value) < 1e-3


def test_prompt_logprobs(post: Any, logprobs_of: Any) -> None:
    for prompt in ("The quick brown fox", LONG):
        choice = post(C, prompt=prompt, prompt_logprobs=2, max_tokens=1, return_token_ids=True)[
            "choices"
        ][0]
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        ids = choice["prompt_token_ids"]
        table = logprobs_of(ids)[:-1]
        for entry, token_id, row in zip(rest, ids[1:], table, strict=True):
            own = entry[str(token_id)]
            assert own["rank"] == 1 + int((row > row[token_id]).sum())
            assert set(map(str, row.topk(2).indices.tolist())) <= set(entry)
            for other, told in entry.items():
                assert abs(told["logprob"] - row[int(other)].item()) < 1e-3


TEXTS = st.sampled_from(
    [
        "Count: 1 2 3",
        "x",
        "Repeat exactly: 你好 龜 가 🫠 🌶🌶",
        PEPPER * 3 + PEPPER[:1],
        "def f(n):\n",
    ]
)


@given(
    prompt=TEXTS,
    logprobs=st.sampled_from([None, 0, 1, 5]),
    max_tokens=st.integers(1, 14),
    stop=st.sampled_from([None, ["zzzz-never"], [" ", "4"], ["\n"], ["🌶"], [",", "\n\n"]]),
    included=st.booleans(),
    echo=st.booleans(),
    bias=st.sampled_from([None, {"10813": 100}, {"2": 100}, {"28": 3}]),
    n=st.sampled_from([1, 2]),
    ids=st.booleans(),
    more=st.sampled_from(
        [{}, {"ignore_eos": True}, {"min_tokens": 1}, {"skip_special_tokens": False}]
    ),
)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_a_stream_equals_the_whole(
    post: Any,
    stream: Any,
    prompt: Any,
    logprobs: int | None,
    max_tokens: int,
    stop: list[str] | None,
    included: bool,
    echo: bool,
    bias: dict[str, float] | None,
    n: int,
    ids: bool,
    more: dict[str, Any],
) -> None:
    """K3, B08."""
    body: dict[str, Any] = {
        "prompt": prompt, "logprobs": logprobs, "max_tokens": max_tokens, "stop": stop, "echo": echo,
        "include_stop_str_in_output": included, "logit_bias": bias, "n": n, "temperature": 0,
        "return_token_ids": ids, **more,
    }  # fmt: skip
    body = {**body, "min_tokens": min(body.get("min_tokens", 0), max_tokens)}
    whole = post(C, **body)
    *chunks, last = stream(C, **body, stream_options={"include_usage": True})
    usage = dict(last["usage"])
    usage.pop("prompt_tokens_details")
    assert usage == {k: v for k, v in whole["usage"].items() if k in usage}
    for index, choice in enumerate(whole["choices"]):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if ids:
            assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for name, values in choice["logprobs"].items():
            told = [part["logprobs"] for part in parts if part["logprobs"]]
            assert [value for one in told for value in one[name]] == values
        check_chunks(parts)
        if stop is None and n == 1:
            told = choice["logprobs"]["tokens"]
            assert len(told) == sum(
                whole["usage"][key] for key in ("completion_tokens", *(["prompt_tokens"] * echo))
            )


def check_chunks(parts: list[Any]) -> None:
    """No token comes before its text, and none later than the chunk that has the last of it."""
    given = 0
    for part in parts:
        before, given = given, given + len(part["text"])
        for name, offset in zip(
            *(part["logprobs"][key] for key in ("tokens", "text_offset"))
            if part["logprobs"]
            else ((), ()),
            strict=True,
        ):
            assert offset <= given
            if not name.startswith(("bytes:", "<|")):
                assert before < offset + len(name) <= given or not name
