"""One request streamed and whole: equal in text, ids, log-probabilities, reasons and usage.

Parameters are drawn, stop strings from what the model says without them; several requests run at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.slow, pytest.mark.native]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EOS = 256
TEXTS = ["Hello", "naïve 🌶 text", "aaaa aaaa", "x", "The quick brown fox jumps over " * 3]

Request = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def client(tiny_model: Path, start_server: Callable[..., Any]) -> Iterator[httpx.Client]:
    flags = ("--check-invariants", "--num-gpu-blocks-override", "60", "--max-num-batched-tokens")
    with start_server("--model", str(tiny_model), *flags, "48", "--max-num-seqs", "12") as server:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            yield client
        server.wait_idle()


# --- what is asked -------------------------------------------------------------------------------


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these fields, or none."""
    return st.fixed_dictionaries({}, optional=fields)


SHARED: dict[str, st.SearchStrategy[Any]] = {
    "min_tokens": st.integers(0, 6),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 255), max_size=8),
    "logit_bias": st.sampled_from([{str(EOS): 3.0}, {str(EOS): 100.0}, {"32": 2.0}]),
    "repetition_penalty": st.sampled_from([1.3, 2.0]),
    "presence_penalty": st.sampled_from([-1.0, 1.5]),
    "cache_salt": st.sampled_from(["a", "b"]),
}
LENGTHS = st.integers(1, 24)
IDS = st.lists(st.integers(0, 255), min_size=1, max_size=30)
PROMPTS = st.one_of(
    st.sampled_from(TEXTS),
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    IDS,
    st.lists(IDS, min_size=1, max_size=2),
)
DRAWING = st.sampled_from([{"temperature": 0}, {"temperature": 0}, {"temperature": 1, "seed": 7}])


@st.composite
def completions(draw: st.DrawFn) -> Request:
    body = {"prompt": draw(PROMPTS), "max_tokens": draw(LENGTHS), **draw(DRAWING)}
    more = optional(n=st.integers(1, 3), logprobs=st.integers(0, 3), echo=st.booleans(), **SHARED)
    return COMPLETIONS, possible(body | draw(more))


@st.composite
def chats(draw: st.DrawFn) -> Request:
    messages = [{"role": "user", "content": draw(st.sampled_from(TEXTS))}]
    if draw(st.booleans()):
        messages.append({"role": "assistant", "content": draw(st.sampled_from(TEXTS))})
    body = {"messages": messages, "max_completion_tokens": draw(LENGTHS), **draw(DRAWING)}
    if messages[-1]["role"] == "assistant":
        body["continue_final_message"] = draw(st.booleans())
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 3))}
    more = optional(n=st.integers(1, 3), echo=st.booleans(), **SHARED)
    return CHAT, possible(body | draw(more))


def possible(body: dict[str, Any]) -> dict[str, Any]:
    """No more least tokens than most."""
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    return body | ({"min_tokens": min(body["min_tokens"], most)} if "min_tokens" in body else {})


def with_stops(request: Request, cuts: list[tuple[int, int, int]], texts: list[str]) -> Request:
    """The request with stop strings that its answers hold: (answer, begin, length) each."""
    route, body = request
    stops = []
    for answer, begin, length in cuts:
        text = texts[answer % len(texts)]
        stops.append(text[begin % max(1, len(text)) :][:length])
    stops = [stop for stop in stops if stop]
    return route, body | ({"stop": stops} if stops else {})


# --- what is answered ----------------------------------------------------------------------------


def whole(client: httpx.Client, request: Request) -> dict[str, Any]:
    route, body = request
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chunks_of(client: httpx.Client, request: Request, options: Any) -> list[dict[str, Any]]:
    route, body = request
    response = client.post(route, json={**body, "stream": True, "stream_options": options})
    assert response.status_code == 200, response.text
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def choices_of(answer: dict[str, Any], route: str) -> list[dict[str, Any]]:
    """The choices of a whole answer in one shape for both routes."""
    found = []
    for choice in answer["choices"]:
        logprobs = choice["logprobs"] or {}
        if route == CHAT:
            text, logprobs = choice["message"]["content"], {"content": logprobs.get("content", [])}
            ids = answer.get("prompt_token_ids")
        else:
            text, ids = choice["text"], choice.get("prompt_token_ids")
        found.append(
            {
                "text": text,
                "logprobs": {name: value for name, value in logprobs.items() if value},
                "token_ids": choice.get("token_ids"),
                "prompt_token_ids": ids,
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice["stop_reason"],
            }
        )
    return found


def joined(chunks: list[dict[str, Any]], route: str, has_ids: bool) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream put together."""
    found: dict[int, dict[str, Any]] = {}
    prompt_ids = None
    for chunk in chunks:
        prompt_ids = chunk.get("prompt_token_ids", prompt_ids)
        for part in chunk["choices"]:
            first = part["index"] not in found
            choice = found.setdefault(part["index"], _empty(has_ids))
            assert choice["finish_reason"] is None, "a chunk after the last"
            if route == CHAT:
                assert ("role" in part["delta"]) is first
                choice["text"] += part["delta"].get("content", "")
                choice["prompt_token_ids"] = prompt_ids
                if part["finish_reason"] is not None:
                    assert part["delta"] == {}
            else:
                choice["text"] += part["text"]
                choice["prompt_token_ids"] = part.get(
                    "prompt_token_ids", choice["prompt_token_ids"]
                )
            for name, values in (part["logprobs"] or {}).items():
                if values:
                    choice["logprobs"].setdefault(name, []).extend(values)
            if has_ids:
                choice["token_ids"] += part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
    return [found[index] for index in sorted(found)]


def _empty(has_ids: bool) -> dict[str, Any]:
    return {
        "text": "",
        "logprobs": {},
        "token_ids": [] if has_ids else None,
        "prompt_token_ids": None,
        "finish_reason": None,
        "stop_reason": None,
    }


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """Usage but for what the prefix cache had, which depends on who came before."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= cached < usage["prompt_tokens"]
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def check(request: Request, answer: dict[str, Any], chunks: list[dict[str, Any]]) -> None:
    route, body = request
    has_ids = bool(body.get("return_token_ids"))
    assert joined(chunks, route, has_ids) == choices_of(answer, route)
    told = [counts(chunk["usage"]) for chunk in chunks if chunk.get("usage")]
    if told:
        assert told[-1] == counts(answer["usage"])
        numbers = [usage["completion_tokens"] for usage in told]
        assert numbers == sorted(numbers)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in answer["choices"] if route == COMPLETIONS else ():
        offsets = (choice["logprobs"] or {}).get("text_offset", [])
        assert offsets == sorted(offsets)
        assert not offsets or offsets[-1] <= len(choice["text"])
    for choice in answer["choices"]:
        for stop in body.get("stop", ()) if choice["finish_reason"] == "stop" else ():
            if choice["stop_reason"] == stop and body.get("include_stop_str_in_output"):
                text = choice["text"] if route == COMPLETIONS else choice["message"]["content"]
                assert text.endswith(stop)


OPTIONS = st.sampled_from(
    [
        None,
        {"include_usage": True},
        {"continuous_usage_stats": True},
        {"include_usage": True, "continuous_usage_stats": True},
    ]
)
CUTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30), st.integers(1, 4)), max_size=4)


@given(
    requests=st.lists(
        st.tuples(st.one_of(completions(), chats()), CUTS, OPTIONS), min_size=1, max_size=4
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_stream_says_what_the_whole_answer_says(
    client: httpx.Client, requests: list[tuple[Request, Any, Any]]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [request for request, _, _ in requests]
        free = list(pool.map(lambda request: whole(client, request), asked))
        stopped = []
        for request, answer, (_, cuts, _) in zip(asked, free, requests, strict=True):
            texts = [choice["text"] for choice in choices_of(answer, request[0])]
            stopped.append(with_stops(request, cuts, texts))
        wholes = [pool.submit(whole, client, request) for request in stopped]
        streams = [
            pool.submit(chunks_of, client, request, options)
            for request, (_, _, options) in zip(stopped, requests, strict=True)
        ]
        for request, one, other in zip(stopped, wholes, streams, strict=True):
            check(request, one.result(), other.result())


def test_named_alternatives_are_what_stands_beside_a_token(client: httpx.Client) -> None:
    named = [65, 66, 67]
    common = {"temperature": 0, "ignore_eos": True, "logprob_token_ids": named}
    common["return_tokens_as_token_ids"] = True
    body = {"prompt": "Hello", "max_tokens": 4, "logprobs": 2, **common}
    (choice,) = whole(client, (COMPLETIONS, body))["choices"]
    names = [f"token_id:{token_id}" for token_id in named]
    for token, top in zip(
        choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
    ):
        assert set(top) == {token, *names}
    check((COMPLETIONS, body), {"choices": [choice]}, chunks_of(client, (COMPLETIONS, body), None))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "logprobs": True}
    (choice,) = whole(client, (CHAT, body | common))["choices"]
    for entry in choice["logprobs"]["content"]:
        told = [top["logprob"] for top in entry["top_logprobs"]]
        assert sorted(top["token"] for top in entry["top_logprobs"]) == sorted(names)
        assert told == sorted(told, reverse=True)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_beams_have_log_probabilities(client: httpx.Client, route: str) -> None:
    body: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 6, "ignore_eos": True}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "temperature": 0}
    if route == COMPLETIONS:
        body |= {"prompt": "Hello", "logprobs": 1}
    else:
        body |= {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True}
    choices = whole(client, (route, body))["choices"]
    assert len(choices) == 3
    for choice in choices:
        logprobs = choice["logprobs"]
        if route == COMPLETIONS:
            tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
        else:
            tokens = [entry["token"] for entry in logprobs["content"]]
            values = [entry["logprob"] for entry in logprobs["content"]]
        assert tokens == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
        assert len(tokens) == 6
        assert sum(values) == pytest.approx(choice["cumulative_logprob"], abs=1e-4)
