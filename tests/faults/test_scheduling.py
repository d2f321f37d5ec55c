"""Known faults F: nobody waits for one long prompt, one slow reader or a client that has gone."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.engine.api import SamplingParams
from octavo.engine.build import build_core
from octavo.engine.config.engine_config import EngineConfig
from octavo.engine.scheduling.request import NewRequest
from octavo.engine.service.core import EngineCore

pytestmark = [pytest.mark.model, pytest.mark.slow]
C, X = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def make_core(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]
) -> Callable[..., EngineCore]:
    folder = write_model(tmp_path_factory.mktemp("wide"), window=8192)

    def make(**options: Any) -> EngineCore:
        own = {"check_invariants": True, "max_num_seqs": 8, "num_gpu_blocks_override": 600}
        options = {"model": str(folder), **own, **options}
        core, _ = build_core(EngineConfig.from_options(options), 0)
        return core

    return make


def add(core: EngineCore, name: str, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    core.add(NewRequest(name, [ord(name)] * length, params, 0, 0.0))


def steps_until(core: EngineCore, name: str) -> list[tuple[set[str], int]]:
    """Steps until a request ends: which requests got a token in each, and how many tokens it had."""
    steps = []
    while True:
        output = core.step()
        steps.append(
            ({u.request_id for u in output.updates if u.token_ids}, output.num_step_tokens)
        )
        if any(u.request_id == name and u.finish_reason for u in output.updates):
            return steps


@pytest.mark.parametrize(("chunk", "num_steps"), [(128, 56), (8192, 1)])
def test_f01_a_long_prompt_holds_up_running_streams_by_a_chunk_at_most(
    make_core: Callable[..., EngineCore], chunk: int, num_steps: int
) -> None:
    core = make_core(max_num_batched_tokens=chunk, max_mixed_prefill_tokens=chunk)
    add(core, "A", 10, 200)
    for _ in range(20):
        core.step()
    add(core, "B", 7000, 1)
    steps = steps_until(core, "B")
    assert len(steps) == num_steps  # so much sooner does A get its next tokens
    assert all("A" in got for got, _ in steps)  # one in every step
    assert max(count for _, count in steps) <= chunk + 1


def test_f01_by_default_prompts_come_in_chunks_beside_streams(
    make_core: Callable[..., EngineCore],
) -> None:
    core = make_core()
    for name in "AC":
        add(core, name, 10, 400)
    for _ in range(3):
        core.step()
    add(core, "B", 7000, 1)
    steps = steps_until(core, "B")
    assert all({"A", "C"} <= got for got, _ in steps)
    assert max(count for _, count in steps) <= 128 + 3  # --max-mixed-prefill-tokens


def test_f02_health_does_not_wait_for_a_tokeniser(exact: Any) -> None:
    """A text of a million characters takes the tokeniser long; a blocked loop would answer it first."""
    text = "The quick brown fox, 12345 times. " * 30_000
    done = threading.Event()
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(exact.send("/tokenize", prompt=text[: 1 << 20]))
        done.set()

    stream = exact.connect(C, prompt="Count:", max_tokens=400, ignore_eos=True)
    stream.read_until(b"data: ")
    thread = threading.Thread(target=ask)
    with httpx.Client(base_url=exact.url, timeout=60) as client:
        client.get("/health")
        thread.start()
        num_probes = 0
        while not done.is_set():
            assert client.get("/health").status_code == 200
            num_probes += 1
    thread.join()
    assert answers[0].status_code == 200
    assert num_probes > 50
    before = stream.received.count(b"data: ")
    stream.read_until(b"data: ", before + 5)  # goes on
    stream.close()


@pytest.mark.parametrize(
    ("num_bytes", "status", "code"),
    [(5_000_000, 400, "context_length_exceeded"), (27_000_000, 413, "request_too_large")],
)
def test_f02_huge_prompts_are_refused(exact: Any, num_bytes: int, status: int, code: str) -> None:
    stream = exact.connect(C, prompt="Count:", max_tokens=300, ignore_eos=True)
    stream.read_until(b"data: ")
    for path, body in (
        (C, {"prompt": "word " * (num_bytes // 5)}),
        (X, {"messages": [{"role": "user", "content": "word " * (num_bytes // 5)}]}),
    ):
        answer = exact.send(path, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    stream.read_until(b"data: ", stream.received.count(b"data: ") + 3)
    stream.close()
    exact.audit()


def relay(server: Any) -> tuple[socket.socket, str]:
    """A plain proxy for one connection, which closes upstream when its client has gone."""
    host, port = server.url.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        for one in (source, target):
            one.close()

    def serve() -> None:
        client, _ = listener.accept()
        upstream = socket.create_connection((host, int(port)))
        threading.Thread(target=pump, args=(upstream, client), daemon=True).start()
        pump(client, upstream)

    threading.Thread(target=serve, daemon=True).start()
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


READER = """
import json, sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
with urllib.request.urlopen(request) as answer:
    for _ in range(6):
        answer.readline()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["closed", "reset", "killed", "through a proxy", "not streamed"])
def test_f04_a_client_that_goes_away_ends_its_request(exact: Any, how: str) -> None:
    exact.wait_idle()
    aborted = exact.metric("vllm:request_success_total", finished_reason="abort")
    ask: dict[str, Any] = {"ignore_eos": True, "max_tokens": 4000, "n": 2, "temperature": 1}
    if how == "killed":
        body = json.dumps(exact.body(X, {**ask, "stream": True}))
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, exact.url + X, body],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"ready\n"
        reader.kill()
        reader.wait()
    elif how == "not streamed":
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(exact.url + X, json=exact.body(X, ask), timeout=2)
    else:
        listener, url = relay(exact) if how == "through a proxy" else (None, exact.url)
        stream = exact.connect(X, through=url, **ask)
        stream.read_until(b"data: ", 3)
        assert exact.metric("vllm:num_requests_running") == 2
        stream.reset() if how == "reset" else stream.close()
        if listener is not None:
            listener.close()
    exact.audit(10)  # 8,000 tokens would take minutes
    tokens = exact.metric("vllm:generation_tokens_total")
    time.sleep(0.5)
    assert exact.metric("vllm:generation_tokens_total") == tokens
    assert exact.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1


@pytest.mark.parametrize("order", list(itertools.permutations("ABC")))
def test_f06_requests_that_wait_may_leave_in_any_order(single: Any, order: tuple[str, ...]) -> None:
    streams = {}
    for name in "ABC":
        streams[name] = single.connect(C, prompt=name, max_tokens=2000, ignore_eos=True)
        streams[name].read_until(b"\r\n\r\n")  # admitted, so they queue in this order
    streams["A"].read_until(b"data: {")
    left = list("ABC")
    for name in order:
        single.wait_for("vllm:num_requests_waiting", len(left) - 1)
        streams[name].close()
        left.remove(name)
        if left:
            streams[left[0]].read_until(b"data: {")  # the first of the rest has the seat
    single.audit()
    single.canary()


def test_f06_an_abort_twice_late_or_of_nobody_is_passed_over(
    make_core: Callable[..., EngineCore],
) -> None:
    core = make_core(max_num_seqs=1)
    for name in "ABC":
        add(core, name, 40, 3)
    core.step()
    core.abort(["C", "C", "nobody"])
    core.abort(["C"])
    finished = [got for got, _ in steps_until(core, "B")]
    core.abort(["A", "B"], [("A", 0), ("B", 0), ("nobody", 3)])
    assert not core.has_work or core.step().updates == []
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert not any("C" in got for got in finished)


def test_f08_a_big_request_is_served_and_lets_others_pass_afterwards(
    make_core: Callable[..., EngineCore],
) -> None:
    """First come, first served: a request of nine tenths of the pool waits for those before it only."""
    core = make_core(num_gpu_blocks_override=64, max_num_batched_tokens=64)
    begun: list[str] = []
    ended: list[str] = []
    names = [chr(i) for i in range(97, 123)]
    for name in names[:4]:
        add(core, name, 16, 16)
    core.step()
    add(core, "Z", 900, 20)
    waiting = iter(names[4:])
    for step in range(3000):
        if step % 4 == 0 and (tiny := next(waiting, None)):
            add(core, tiny, 16, 8)  # tiny ones keep coming
        if not core.has_work:
            break
        updates = core.step().updates
        begun += [u.request_id for u in updates if u.request_id not in begun]
        ended += [u.request_id for u in updates if u.finish_reason]
    assert sorted(ended) == sorted([*names, "Z"])
    assert begun.index("Z") == 4  # behind those that ran; all that came later waited
    assert core.stats().num_used_blocks == 0


def test_f12_slow_readers_lose_nothing(tiny: Any) -> None:
    """200 streams whose chunks are taken one at a time, over connections that are used again."""
    tiny.canary()
    tiny.wait_idle()
    aborted = tiny.metric("vllm:request_success_total", finished_reason="abort")

    async def one(client: httpx.AsyncClient, i: int) -> tuple[int, bool]:
        body = {
            "prompt": [i], "max_tokens": 24, "temperature": 1, "seed": i, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        count, is_done = 0, False
        async with client.stream("POST", C, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event
                    count += len(event["choices"][0]["token_ids"])
                    await asyncio.sleep(0.1)
                is_done = is_done or line == "data: [DONE]"
        return count, is_done

    async def crowd() -> list[tuple[int, bool]]:
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
        async with httpx.AsyncClient(base_url=tiny.url, timeout=120, limits=limits) as client:
            first = await asyncio.gather(*(one(client, i) for i in range(200)))
            quick = await client.post(C, json={"prompt": [1], "max_tokens": 2})
            assert quick.status_code == 200
            return [*first, *await asyncio.gather(*(one(client, i) for i in range(40)))]

    assert asyncio.run(crowd()) == [(24, True)] * 240
    tiny.audit()
    assert tiny.metric("vllm:request_success_total", finished_reason="abort") == aborted
    tiny.canary()


@pytest.mark.parametrize("streamed", [True, False])
def test_f12_a_request_behind_another_is_no_disconnect(tiny: Any, streamed: bool) -> None:
    """Pipelined: the second request arrives while the first is being answered."""
    host, port = tiny.url.removeprefix("http://").split(":")
    body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True, "stream": streamed}
    content = json.dumps(body).encode()
    head = f"POST {C} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request + request)
        connection.sendall(request + last)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200") == 4
    assert received.count(b'"finish_reason":"length"') == 3
    assert b'"finish_reason":"abort"' not in received
    tiny.audit()
