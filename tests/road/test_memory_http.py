"""Shared memory over HTTP, with the real model: what clients see of it, and what the metrics prove."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def debugged(start_server: Callable[..., Any]) -> Iterator[Any]:
    """In float32, so that a cached block gives the logits that computing it gives."""
    flags = ("--check-invariants", "--enable-debug-endpoints", "--dtype", "float32")
    with start_server(*flags, "--max-num-seqs", "16") as running:
        yield running


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(17, 49152) for _ in range(length)]


def complete(server: Any, status: int = 200, **body: Any) -> Any:
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def num_cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def snapshot(server: Any) -> Any:
    answer = httpx.get(f"{server.url}/debug/kv", timeout=60)
    assert answer.status_code == 200
    return answer.json()


def test_a_repeated_prompt_is_cached_and_gives_the_same_text(debugged: Any) -> None:
    prompt = ids(1, 40)
    first, second = complete(debugged, prompt=prompt), complete(debugged, prompt=prompt)
    assert num_cached(first) == 0
    assert 32 <= num_cached(second) < 40
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    both = complete(debugged, prompt=[prompt, prompt])
    assert num_cached(both) == 2 * num_cached(second)


def test_a_stream_tells_cached_tokens_too(debugged: Any) -> None:
    body = {
        "prompt": ids(2, 40), "max_tokens": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    seen = []
    for _ in range(2):
        answer = httpx.post(f"{debugged.url}/v1/completions", json=body, timeout=120)
        events = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
        seen.append(num_cached(json.loads(events[-1].removeprefix("data: "))))
    assert seen[0] == 0
    assert seen[1] >= 32


def test_a_salt_keeps_tenants_apart(debugged: Any) -> None:
    prompt = ids(3, 40)
    assert num_cached(complete(debugged, prompt=prompt, cache_salt="a")) == 0
    assert num_cached(complete(debugged, prompt=prompt, cache_salt="b")) == 0
    assert num_cached(complete(debugged, prompt=prompt)) == 0
    assert num_cached(complete(debugged, prompt=prompt, cache_salt="a")) >= 32
    for wrong in ("", "x" * 129, "a@b", "a/b", "a\\b", "a\0b"):
        error = complete(debugged, 400, prompt=prompt, cache_salt=wrong)["error"]
        assert error["param"] == "cache_salt"


def test_a_reset_forgets(debugged: Any) -> None:
    prompt = ids(4, 40)
    complete(debugged, prompt=prompt)
    answer = httpx.post(f"{debugged.url}/reset_prefix_cache", timeout=60)
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert not any(block["is_cached"] for block in snapshot(debugged)["blocks"])
    assert num_cached(complete(debugged, prompt=prompt)) == 0


def test_beams_come_best_first_with_their_log_probabilities(debugged: Any) -> None:
    ask: dict[str, Any] = {"prompt": "The capital of France is", "n": 3, "use_beam_search": True}
    choices = complete(debugged, **ask, max_tokens=12)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3
    scores = [choice["cumulative_logprob"] for choice in choices]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0
    assert "Paris" in choices[0]["text"]
    greedy = complete(debugged, prompt=ask["prompt"], max_tokens=12)["choices"][0]["text"]
    single = complete(debugged, **{**ask, "n": 1}, max_tokens=12)["choices"][0]["text"]
    assert single == greedy


def test_beams_in_a_chat(debugged: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "n": 2, "best_of": 4, "use_beam_search": True, "max_tokens": 24,
    }  # fmt: skip
    answer = httpx.post(f"{debugged.url}/v1/chat/completions", json=body, timeout=120).json()
    assert ["cumulative_logprob" in choice for choice in answer["choices"]] == [True, True]
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_best_of_chooses_among_what_n_gives(debugged: Any) -> None:
    ask: dict[str, Any] = {
        "prompt": "Once upon a time",
        "temperature": 1,
        "seed": 5,
        "max_tokens": 16,
    }
    drawn = [choice["text"] for choice in complete(debugged, **ask, n=5)["choices"]]
    best = complete(debugged, **ask, n=2, best_of=5)
    texts = [choice["text"] for choice in best["choices"]]
    scores = [choice["cumulative_logprob"] for choice in best["choices"]]
    assert set(texts) <= set(drawn)
    assert scores == sorted(scores, reverse=True)
    assert best["usage"]["completion_tokens"] == 5 * 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "stream": True}, "stream"),
        ({"n": 2, "use_beam_search": True, "stream": True}, "stream"),
        ({"n": 2, "use_beam_search": True, "stop": "x"}, "stop"),
        ({"n": 17}, "n"),
        ({"best_of": 17}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    debugged: Any, fields: dict[str, Any], param: str
) -> None:
    assert complete(debugged, 400, prompt="x", **fields)["error"]["param"] == param


def test_eight_choices_compute_one_prompt_and_share_its_blocks(debugged: Any) -> None:
    """A prompt of 512 tokens is 32 full blocks: eight sequences point at them, and own one block each."""
    debugged.wait_idle()
    before = debugged.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    body = {
        "prompt": ids(6, 512), "n": 8, "max_tokens": 64, "temperature": 1, "seed": 1,
        "ignore_eos": True,
    }  # fmt: skip

    async def scene() -> list[Any]:
        async with httpx.AsyncClient(base_url=debugged.url, timeout=120) as client:
            answer = asyncio.ensure_future(client.post("/v1/completions", json=body))
            seen = []
            while not answer.done():
                seen.append((await client.get("/debug/kv")).json())
            assert (await answer).status_code == 200
            return seen

    seen = asyncio.run(scene())
    shared = [max(sum(b["ref_count"] == 8 for b in s["blocks"]) for s in seen)]
    assert shared == [32]
    most_used = max(sum(b["ref_count"] > 0 for b in s["blocks"]) for s in seen)
    assert 32 + 8 <= most_used <= 32 + 8 * 5
    after = debugged.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert after - before == 512


def check_consistent(kv: Any) -> None:
    assert set(kv) == {"num_blocks", "block_size", "blocks", "sequences"}
    assert [block["id"] for block in kv["blocks"]] == list(range(kv["num_blocks"]))
    pointers: Counter[int] = Counter()
    owners: dict[int, set[int]] = {}
    for sequence in kv["sequences"]:
        assert set(sequence) == {"request_id", "seq_id", "status", "num_tokens", "block_table"}
        assert sequence["status"] in ("running", "waiting")
        assert sequence["num_tokens"] <= len(sequence["block_table"]) * kv["block_size"]
        pointers.update(sequence["block_table"])
        for block_id in sequence["block_table"]:
            owners.setdefault(block_id, set()).add(sequence["seq_id"])
    for block in kv["blocks"]:
        assert set(block) == {"id", "ref_count", "num_filled", "is_cached", "seq_ids"}
        assert block["ref_count"] == pointers[block["id"]]
        assert set(block["seq_ids"]) == owners.get(block["id"], set())
        assert 0 <= block["num_filled"] <= kv["block_size"]


def test_the_picture_is_consistent_while_streams_run(debugged: Any) -> None:
    body = {
        "max_tokens": 200, "temperature": 1, "ignore_eos": True, "stream": True, "n": 3,
    }  # fmt: skip

    async def scene() -> None:
        async with httpx.AsyncClient(base_url=debugged.url, timeout=120) as client:

            async def watch() -> list[Any]:
                answers = await asyncio.gather(*(client.get("/debug/kv") for _ in range(100)))
                assert {answer.status_code for answer in answers} == {200}
                return [answer.json() for answer in answers]

            request = {**body, "prompt": ids(7, 100)}
            async with client.stream("POST", "/v1/completions", json=request) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                for _ in range(3):
                    pictures = await watch()
                    for picture in pictures:
                        check_consistent(picture)
                    assert any(picture["sequences"] for picture in pictures)

    asyncio.run(scene())
    debugged.wait_idle()
    check_consistent(snapshot(debugged))
    assert snapshot(debugged)["sequences"] == []


def test_without_the_flag_there_is_no_such_route(server: Any) -> None:
    for method, path in (("GET", "/debug/kv"), ("POST", "/reset_prefix_cache")):
        answer = httpx.request(method, f"{server.url}{path}", timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
