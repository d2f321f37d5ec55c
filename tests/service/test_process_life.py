"""How the server's processes begin and end, with a real engine on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from octavo.engine.config.engine_config import EngineConfig, ExecutionConfig
from octavo.engine.config.environment import engine_environment

pytestmark = pytest.mark.slow

LONG = {"prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True, "stream": True, "seed": 1}


@pytest.fixture
def server(start_server: Callable[..., Any], tiny_model: Path) -> Iterator[Any]:
    with start_server(
        str(tiny_model), "--check-invariants", "--served-model-name", "tiny"
    ) as running:
        yield running


def engine_of(server: Any) -> psutil.Process:
    (engine,) = psutil.Process(server.process.pid).children()
    assert engine.name() == "octavo-engine"
    return engine


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_gone(process: psutil.Process, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(process):
        assert time.monotonic() < deadline, "a process outlives the server"
        time.sleep(0.02)


class Reader(threading.Thread):
    """Streams one completion in the background."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.events: list[str] = []
        self.begun = threading.Event()

    def run(self) -> None:
        with suppress(httpx.RemoteProtocolError):  # where the server is killed
            self._read()

    def _read(self) -> None:
        with httpx.stream("POST", f"{self.url}/v1/completions", json=LONG, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.begun.set()


def streaming(server: Any) -> Reader:
    reader = Reader(server.url)
    reader.start()
    assert reader.begun.wait(30)
    return reader


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_streams_with_abort_and_exits_cleanly(server: Any, number: int) -> None:
    engine = engine_of(server)
    reader = streaming(server)
    server.process.send_signal(number)
    assert server.process.wait(10) == 0
    reader.join(10)
    assert reader.events[-1] == "[DONE]"
    assert json.loads(reader.events[-2])["choices"][0]["finish_reason"] == "abort"
    wait_gone(engine, 2)


def test_ctrl_c_reaches_the_group_and_still_ends_cleanly(tiny_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "serve", str(tiny_model), "--port", "0"],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    text = ""
    while "curl" not in text:
        line = process.stderr.readline()
        assert line, f"the server ended early: {text}"
        text += line
    engines = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(10) == 0
    assert "Traceback" not in process.stderr.read()
    for engine in engines:
        wait_gone(engine, 2)


def test_an_engine_that_died_once_too_often_is_told_and_ends_the_server(
    start_server: Callable[..., Any], tiny_model: Path
) -> None:
    with start_server(str(tiny_model), "--max-engine-restarts", "0") as server:
        engine = engine_of(server)
        reader = streaming(server)
        engine.kill()
        reader.join(10)
        assert reader.events[-1] == "[DONE]"
        assert json.loads(reader.events[-2])["error"]["code"] == "engine_dead"
        assert server.process.wait(10) == 1


@pytest.mark.parametrize("is_stopped", [False, True])
def test_engine_ends_within_two_seconds_of_its_front_end(server: Any, is_stopped: bool) -> None:
    engine = engine_of(server)
    streaming(server)
    if is_stopped:
        engine.suspend()
    server.process.kill()
    server.process.wait()
    wait_gone(engine, 2)


def test_client_that_hangs_up_frees_its_blocks(server: Any) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**LONG, "stream": False}, timeout=0.05)
    server.wait_idle(5)
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 2


def test_counting_rule_over_http(server: Any) -> None:
    ask: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "temperature": 0}
    for i in range(10):
        ask["prompt"] = [i + 1] * 7  # nothing that is cached
        usage = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60).json()["usage"]
        assert usage["completion_tokens"] == 10
    server.wait_idle(5)
    for name, count, total in (
        ("time_to_first_token_seconds", 10, None),
        ("inter_token_latency_seconds", 90, None),
        ("e2e_request_latency_seconds", 10, None),
        ("request_queue_time_seconds", 10, None),
        ("request_inference_time_seconds", 10, None),
        ("request_prefill_time_seconds", 10, None),
        ("request_decode_time_seconds", 10, None),
        ("request_num_preemptions", 10, 0),
        ("request_prompt_tokens", 10, 70),
        ("request_generation_tokens", 10, 100),
        ("request_params_max_tokens", 10, 100),
        ("iteration_tokens_total", 100, 170),
    ):
        assert server.metric(f"vllm:{name}_count") == count, name
        if total is not None:
            assert server.metric(f"vllm:{name}_sum") == total, name
    assert server.metric("vllm:prompt_tokens_total") == 70
    assert server.metric("vllm:generation_tokens_total") == 100
    assert server.metric("vllm:request_success_total") == 10
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_n_choices_whole_and_streamed_are_equal_and_leave_nothing(server: Any) -> None:
    ask = {
        "prompt": [[1, 2, 3] * 7, [4, 5]],
        "n": 3,
        "seed": 1,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    url = f"{server.url}/v1/completions"
    salted = {**ask, "cache_salt": "another"}  # so that the stream finds nothing cached
    whole = httpx.post(url, json=salted, timeout=60).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3, 4, 5]
    texts = [choice["text"] for choice in whole["choices"]]
    assert len(set(texts)) == 6
    assert whole["usage"]["completion_tokens"] == 6 * 12
    assert whole["usage"]["prompt_tokens"] == 21 + 2
    streamed = [""] * 6
    ends: list[int] = []
    with httpx.stream("POST", url, json={**ask, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                assert choice["index"] not in ends
                streamed[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    ends.append(choice["index"])
    assert streamed == texts
    assert server.metric("octavo:copy_on_write_total") == 2 * (2 + 2)
    assert sorted(ends) == [0, 1, 2, 3, 4, 5]
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 3, "seed": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    refused = httpx.post(url, json={**ask, "n": 500})
    assert refused.json()["error"]["param"] == "n"
    server.wait_idle(5)


def test_clients_that_leave_wide_requests_leave_no_block(server: Any) -> None:
    wide = {**LONG, "n": 4, "prompt": [3] * 23}
    for cut in (1, 5, 20):
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=wide, timeout=60
        ) as response:
            lines = response.iter_lines()
            for _ in range(cut):
                next(lines)
    server.wait_idle(5)


def test_nonfinite_logits_are_an_error_in_openai_s_shape(
    start_server: Callable[..., Any], poisoned_model: Path
) -> None:
    bad = {"prompt": [7, 8], "max_tokens": 4}
    good = {"prompt": [20, 21], "max_tokens": 4, "temperature": 0}
    with start_server(str(poisoned_model)) as server:
        url = f"{server.url}/v1/completions"
        before = httpx.post(url, json=good).json()["choices"][0]["text"]
        answer = httpx.post(url, json=bad)
        assert answer.status_code == 500
        assert "finite" in answer.json()["error"]["message"]
        lines = httpx.post(url, json={**bad, "stream": True}).text.split("\n\n")
        assert "finite" in json.loads(lines[-3].removeprefix("data: "))["error"]["message"]
        assert httpx.post(url, json=good).json()["choices"][0]["text"] == before
        assert server.metric("vllm:corrupted_requests_total") == 2


def test_a_model_that_cannot_be_loaded_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\x00" * 40)
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", str(tmp_path / "model.gguf"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    assert "model.gguf" in done.stderr
    assert "Traceback" not in done.stderr


CANARY = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}


def send_raw(url: str, data: bytes, pieces: int = 1) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        size = -(-len(data) // pieces)
        received = b""
        try:
            for begin in range(0, len(data), size):
                client.sendall(data[begin : begin + size])
            while part := client.recv(65536):
                received += part
        except ConnectionError:
            pass
        return received


def test_hostile_parameters_end_their_own_request_only(server: Any) -> None:
    url = f"{server.url}/v1/completions"
    before = httpx.post(url, json=CANARY).json()["choices"][0]["text"]
    hostile: list[tuple[dict[str, Any], int]] = [
        ({"top_p": 1e-50}, 200),
        ({"top_p": 5e-324, "top_k": 5}, 200),
        ({"top_k": 5, "repetition_penalty": 1e-44, "prompt": [1] * 9}, 400),
        ({"repetition_penalty": 1e300, "prompt": [1] * 9}, 200),
        ({"min_tokens": 2, "stop_token_ids": list(range(259))}, 400),
        ({"min_tokens": 2, "stop_token_ids": list(range(259)), "temperature": 0}, 400),
        ({"logit_bias": {"5": 10**400}}, 400),
        ({"logit_bias": {str(i): -1 for i in range(2000)}}, 400),
        ({"stop_token_ids": [5] * 2_000_000}, 400),
        ({"temperature": 10**400}, 400),
        ({"seed": 2**63 - 1, "n": 3}, 200),
        ({"seed": -(2**63)}, 200),
    ]
    for body, status in hostile:
        answer = httpx.post(url, json={"prompt": [1, 2], "max_tokens": 3, **body}, timeout=60)
        assert answer.status_code == status, (str(body)[:80], answer.text[:200])
        if status != 200:
            assert answer.json()["error"]["message"]
        again = httpx.post(url, json=CANARY).json()["choices"][0]["text"]
        assert again == before
    server.wait_idle(5)


def test_endless_headers_are_refused_and_large_bodies_are_not(server: Any) -> None:
    endless = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 300_000
    assert send_raw(server.url, endless).startswith(b"HTTP/1.1 431")
    body = json.dumps({**CANARY, "user": "u" * 500_000}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    for pieces in (1, 7):
        assert send_raw(server.url, head + body, pieces).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", "0<&- 1>&- 2>&-"])
def test_a_closed_or_full_stderr_is_no_reason_to_end(tiny_model: Path, redirect: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"exec {sys.executable} -m octavo serve {tiny_model} --port {port} {redirect}"
    process = subprocess.Popen(["bash", "-c", command])
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
    finally:
        process.terminate()
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--seed", "1180591620717411303424"],
        ["--kv-cache-memory-bytes", "1e30"],
        ["--num-gpu-blocks-override", "99999999999999999999"],
        ["--max-model-len", "9000"],
        ["--max-num-seqs", "64", "--max-num-batched-tokens", "8"],
        ["--chat-template", "/nonexistent"],
        ["--tokenizer", "/nonexistent"],
        ["--device", "cuda"],
        ["--api-key", "k", "."],
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence_and_exit_code_two(
    tiny_model: Path, flags: list[str]
) -> None:
    model = [] if flags[0] == "--api-key" else [str(tiny_model)]
    command = [sys.executable, "-m", "octavo", "serve", *model, "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert flags[0].lstrip("-").split("-")[0] in done.stderr


def test_a_long_tmpdir_does_not_keep_the_engine_from_starting(
    tiny_model: Path, tmp_path: Path, start_server: Callable[..., Any], monkeypatch: Any
) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with start_server(str(tiny_model)) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=CANARY).status_code == 200


@pytest.mark.parametrize(
    ("environ", "backend", "expected"),
    [
        ({"A": "b"}, "auto", {"A": "b", "GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, "auto", {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "auto", {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({}, "torch", {}),
    ],
)
def test_compute_threads_sleep_soon_unless_told_otherwise(
    environ: dict[str, str], backend: str, expected: dict[str, str]
) -> None:
    config = EngineConfig(execution=ExecutionConfig(attention_backend=backend))
    assert engine_environment(config, environ) == expected
