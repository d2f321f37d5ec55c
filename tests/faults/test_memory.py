"""Known faults E: shared, evicted, preempted and aborted memory changes no answer and comes back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]
C, X = "/v1/completions", "/v1/chat/completions"
STORY = (
    "Once upon a time, in a small village by the sea, there lived a young girl named Mary who loved "
    "to count: 1, 2, 3. The capital of France is Paris. Water boils at 100 degrees. "
)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """600 tokens, one more, and one that shares the first 300."""
    ids = tokenizer.encode(STORY * 20)[:600]
    return [ids, [*ids, *tokenizer.encode("x")], [*ids[:300], *tokenizer.encode(" But then")]]


def answer(llm: LLM, prompt: list[int]) -> tuple[int, list[int], list[float]]:
    """How much was cached, the four tokens that follow and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (one,) = output.outputs
    told = [entry[i].logprob for entry, i in zip(one.logprobs or (), one.token_ids, strict=True)]
    return output.num_cached_tokens, one.token_ids, told


@pytest.fixture(scope="module")
def cold(model_path: Path, prompts: list[list[int]]) -> list[tuple[int, list[int], list[float]]]:
    """The answers of an engine that keeps nothing."""
    with LLM(str(model_path), dtype="float32", enable_prefix_caching=False) as llm:
        answers = [answer(llm, prompt) for prompt in prompts]
        assert llm.stats().prefix_cache_queries == 0
    return answers


def test_e01_without_a_cache_the_answers_are_transformers_own(
    prompts: list[list[int]], cold: list[tuple[int, list[int], list[float]]], logprobs_of: Any
) -> None:
    for prompt, (num_cached, ids, told) in zip(prompts, cold, strict=True):
        assert num_cached == 0
        table = logprobs_of(prompt + ids)[len(prompt) - 1 : -1]
        assert ids == table.argmax(dim=-1).tolist()
        assert told == pytest.approx(table.amax(dim=-1).tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("block_size", "chunk"), [(16, 64), (256, 8192)], ids=["small pieces", "large pieces"]
)
def test_e01_a_hit_gives_a_miss_s_answer(
    model_path: Path,
    prompts: list[list[int]],
    cold: list[tuple[int, list[int], list[float]]],
    block_size: int,
    chunk: int,
) -> None:
    order = (0, 0, 0, 0, 1, 2)
    with LLM(
        str(model_path),
        dtype="float32",
        check_invariants=True,
        block_size=block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        found = [answer(llm, prompts[i]) for i in order]
    whole = 600 // block_size * block_size
    assert found[0][0] == 0
    assert all(whole <= num_cached <= 599 for num_cached, _, _ in found[1:4])
    assert whole <= found[4][0] <= 600
    assert 300 // block_size * block_size <= found[5][0] <= 300
    for (_, ids, told), index in zip(found, order, strict=True):
        assert ids == cold[index][1]
        assert told == pytest.approx(cold[index][2], abs=1e-3)


def test_e01_the_usage_tells_the_hit(exact: Any, prompts: list[list[int]]) -> None:
    ask: dict[str, Any] = {"prompt": prompts[2], "max_tokens": 1}
    exact.http.post("/reset_prefix_cache")
    usages = [exact.ask(C, **ask)["usage"] for _ in range(2)]
    assert [u["prompt_tokens_details"]["cached_tokens"] == 0 for u in usages] == [True, False]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 288
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]


POOL = {
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "check_invariants": True,
}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_e03_preempted_requests_that_hit_their_own_blocks(tiny_path: Path, mode: str) -> None:
    rng = random.Random(3)
    common = [rng.randrange(256) for _ in range(200)]
    asked = [[*common, *(rng.randrange(256) for _ in range(i % 5 + 1))] for i in range(24)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=100, ignore_eos=True) for i in range(24)
    ]
    with LLM(str(tiny_path), enable_prefix_caching=False) as llm:
        alone = [
            llm.generate(prompt, one, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, one in zip(asked, params, strict=True)
        ]
    swap = {"swap_space": 0.01, "preemption_mode": "swap"} if mode == "swap" else {}
    with LLM(str(tiny_path), **POOL, **swap) as llm:
        found = llm.generate(asked, params, use_tqdm=False)
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert bool(stats.num_preemptions_by_swap) == (mode == "swap")
    assert stats.num_used_blocks == 0
    assert [one.outputs[0].token_ids for one in found] == alone
    assert {len(ids) for ids in alone} == {100}


def test_e06_what_the_pool_cannot_hold_neither_waits_nor_blocks(pool: Any) -> None:
    window = pool.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert window == 1024  # the model's is 8192: it shrinks to the pool
    answer = pool.send(C, prompt=[905] * 1500, max_tokens=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "1024" in answer.json()["error"]["message"]
    steps = pool.metric("vllm:num_preemptions_total")
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        big = threads.submit(pool.ask, C, prompt=[905] * 1000, max_tokens=500, ignore_eos=True)
        pool.wait_for("vllm:num_requests_running", 1)
        pool.canary()  # comes behind it
        found = big.result(120)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 24
    assert pool.metric("vllm:num_preemptions_total") - steps <= 1
    wide = pool.send(C, prompt=[905] * 600, n=8, max_tokens=400)
    assert wide.status_code == 400
    assert {"64"} <= set(wide.json()["error"]["message"].replace(".", "").split())
    pool.audit()


def test_e06_a_window_that_the_pool_cannot_hold_refuses_to_start(model_path: Path) -> None:
    from octavo.engine.errors import ConfigError

    with pytest.raises(ConfigError, match=r"8192 .*1024"):
        LLM(str(model_path), num_gpu_blocks_override=64, max_model_len=8192)


def test_e08_three_hundred_cut_connections_leave_nothing(tiny: Any) -> None:
    """Cut before the headers, in the prompt, between tokens and at the end; two choices each."""
    tiny.canary()
    rng = random.Random(8)
    host, port = tiny.url.removeprefix("http://").split(":")
    process = psutil.Process(tiny.server.process.pid)

    async def one(i: int, limit: asyncio.Semaphore) -> None:
        async with limit:
            length = rng.choice((3, 40, 150))
            body = {
                "prompt": [rng.randrange(256) for _ in range(length)], "n": 2, "max_tokens": 200,
                "stream": True, "temperature": 1, "ignore_eos": True,
            }  # fmt: skip
            content = json.dumps(body).encode()
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
            head = f"POST {C} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
            kind = i % 6
            writer.write(request[: len(request) // 2] if kind == 0 else request)
            await writer.drain()
            if kind == 2:
                await asyncio.sleep(rng.random() * 0.05)
            elif kind == 3:
                await reader.readuntil(b"\r\n\r\n")
            elif kind == 4:
                for _ in range(rng.randint(2, 60)):
                    await reader.readuntil(b"data:")
            elif kind == 5 and i % 12 == 5:
                await reader.readuntil(b"[DONE]")
            elif kind == 5:
                await reader.readuntil(b'"finish_reason":"length"')
            writer.transport.abort() if rng.random() < 0.5 else writer.close()

    async def crowd() -> None:
        limit = asyncio.Semaphore(40)
        await asyncio.gather(*(one(i, limit) for i in range(300)))

    num_files = process.num_fds()
    aborted = tiny.metric("vllm:request_success_total", finished_reason="abort")
    asyncio.run(crowd())
    tiny.audit()
    ended = tiny.metric("vllm:request_success_total", finished_reason="abort") - aborted
    assert ended > 50  # most of those that were cut off before their end
    deadline = time.monotonic() + 10
    while process.num_fds() > num_files + 3:
        assert time.monotonic() < deadline, "connections stay open"
        time.sleep(0.05)
    whole = tiny.ask(C, prompt=[1] * 500, max_tokens=12, ignore_eos=True)  # the whole window
    assert whole["usage"]["completion_tokens"] == 12
    full = tiny.ask(C, prompt=[[i] * 100 for i in range(8)], max_tokens=28, ignore_eos=True)
    assert full["usage"]["completion_tokens"] == 8 * 28  # the whole pool at the same time
    tiny.audit()
    tiny.canary()


def test_e10_the_index_never_outgrows_the_pool(tiny_path: Path) -> None:
    """Every entry is verified after every step (``check_invariants``)."""
    rng = random.Random(10)
    prompts = [[rng.randrange(256) for _ in range(40)] for _ in range(2000)]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with LLM(str(tiny_path), enable_prefix_caching=False) as llm:
        expected = [
            o.outputs[0].token_ids for o in llm.generate(prompts[:50], params, use_tqdm=False)
        ]
    with LLM(str(tiny_path), **POOL) as llm:
        for start in range(0, 2000, 100):
            llm.generate(prompts[start : start + 100], params, use_tqdm=False)
            stats = llm.stats()
            assert 0 < stats.num_cached_blocks <= 64
            assert stats.num_used_blocks == 0
        assert llm.stats().num_evictions > 2000
        early = llm.generate(prompts[:50], params, use_tqdm=False)
        again = llm.generate(prompts[49], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in early] == expected
    assert {o.num_cached_tokens for o in early} == {0}  # evicted long ago
    assert again[0].num_cached_tokens >= 32
    assert again[0].outputs[0].token_ids == expected[49]


def test_e12_the_gauge_of_kv_usage(pool: Any) -> None:
    pool.audit()
    assert pool.metric("octavo:kv_blocks_total") == 64
    info = httpx.get(f"{pool.url}/metrics", timeout=30).text
    (line,) = [one for one in info.splitlines() if one.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in line
    assert 'num_gpu_blocks="64"' in line
    assert f'kv_cache_memory_bytes="{64 * 16 * 30 * 2 * 3 * 64 * 4}"' in line
    stream = pool.connect(C, prompt=[905] * 512, max_tokens=64, ignore_eos=True)
    stream.read_until(b"data: ")
    seen = []
    while pool.metric("vllm:num_requests_running"):
        seen.append(pool.metric("vllm:kv_cache_usage_perc"))
        used = pool.metric("octavo:kv_blocks_used")
        assert 0 <= used <= 36
    stream.read_until(b"[DONE]")
    stream.close()
    most = max(seen)
    assert min(seen) >= 0
    assert abs(most * 64 - 36) <= 1  # of 575 slots
    pool.wait_idle()
    assert pool.metric("octavo:kv_blocks_cached") > 30
    assert pool.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("length", [16, 23, 31, 32])
def test_e14_children_share_the_prompt_and_nothing_else(exact: Any, length: int) -> None:
    exact.http.post("/reset_prefix_cache")
    ask: dict[str, Any] = {"prompt": [905] * length, "temperature": 1, "ignore_eos": True}
    before = exact.metric("octavo:copy_on_write_total")
    most = 0
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        answer = threads.submit(exact.ask, C, **ask, n=4, seed=3, max_tokens=20)
        while not answer.done():
            blocks = exact.http.get("/debug/kv").json()["blocks"]
            most = max(most, sum(block["ref_count"] > 0 for block in blocks))
    children = [choice["text"] for choice in answer.result()["choices"]]
    exact.audit()
    assert exact.metric("octavo:copy_on_write_total") - before == (3 if length % 16 else 0)
    single = -(-(length + 20) // 16)
    assert most < 4 * single
    assert len(set(children)) == 4
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asks = [{**ask, "seed": 3 + i, "max_tokens": 20} for i in range(4)]
        alone = list(threads.map(lambda one: exact.text(**one), asks))
    assert children == alone


def test_e14_a_child_s_writes_are_its_own(tiny_path: Path) -> None:
    """Of the same kind, at every length and in a pool where children are preempted."""
    many: Callable[[int], SamplingParams] = lambda seed: SamplingParams(  # noqa: E731
        temperature=1.0, seed=seed, n=4, max_tokens=40, ignore_eos=True
    )
    prompts = [[i] * i for i in range(1, 40)]
    with LLM(str(tiny_path), enable_prefix_caching=False) as llm:
        alone = [
            [
                llm.generate(p, many(i + j).with_changes(n=1), use_tqdm=False)[0]
                .outputs[0]
                .token_ids
                for j in range(4)
            ]
            for i, p in enumerate(prompts)
        ]
    with LLM(str(tiny_path), **{**POOL, "num_gpu_blocks_override": 32}) as llm:
        found = llm.generate(prompts, [many(i) for i in range(39)], use_tqdm=False)
        assert llm.stats().num_used_blocks == 0
    assert [[one.token_ids for one in request.outputs] for request in found] == alone
