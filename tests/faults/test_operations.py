"""Known faults H: what operators meet when a server starts, is looked at, and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

ASK = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
SLOW_ENGINE = """
import sys, time

if sys.orig_argv[-1] == "octavo.engine.build":
    time.sleep(3)
"""


def test_h04_loading_is_alive_and_ready_means_that_requests_are_computed(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_ENGINE)
    seen: list[tuple[int, int, int]] = []
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with (
        launch(tmp_path, str(tiny_path), PYTHONPATH=path) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        deadline = time.monotonic() + 120
        while not seen or seen[-1][1] != 200:
            assert time.monotonic() < deadline
            try:
                started, ready = client.get("/startup"), client.get("/ready")
                answer = client.post("/v1/completions", json=ASK)
            except httpx.TransportError:  # the port is not bound yet
                time.sleep(0.05)
                continue
            assert client.get("/health").status_code == 200
            if ready.status_code == 200:
                assert answer.status_code == 200
            if answer.status_code != 200:
                assert (answer.status_code, ready.status_code) == (503, 503)
                assert int(answer.headers["retry-after"]) > 0
            seen.append((started.status_code, ready.status_code, answer.status_code))
    assert seen[0] == (503, 503, 503)
    assert seen[-1][1:] == (200, 200)


def test_h06_no_label_takes_what_clients_say(tiny: Any) -> None:
    """Nothing that they name makes a series more."""

    def series() -> set[str]:
        text = tiny.http.get("/metrics").text
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    def ask(number: int) -> None:
        name = f"x{number}"
        tiny.http.post("/v1/completions", json={**ASK, "user": name})
        tiny.http.post("/v1/completions", json={**ASK, "model": name})
        tiny.http.get(f"/{name}")
        tiny.http.get(f"/v1/models/{name}")
        tiny.http.get(f"/v1/responses/{name}")
        tiny.http.request(f"M{number}", "/health", headers={"X-Request-Id": name})

    ask(0)
    before = series()
    for number in range(1, 40):
        ask(number)
    assert series() == before


def test_h07_a_user_without_a_name_and_a_file_system_that_nobody_writes_to(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path
) -> None:
    """Another uid, no home, and only one folder that is no part of the read-only rest."""
    room = tempfile.mkdtemp()
    mount = "mount -o remount,bind,ro / && mount -t tmpfs -o size=64m tmpfs"
    become = "exec unshare --user --map-user=12345 --map-group=12345"
    script = f'{mount} {room} && {become} "$@"'
    under = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*under, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs a namespace in which a user may mount")
    touched = subprocess.run([*under, "touch", "/x"], check=False, capture_output=True)
    assert b"Read-only" in touched.stderr
    places = {"HOME": "/", "TMPDIR": room, "XDG_CACHE_HOME": ""}
    flags = (str(tiny_path), "--attention-backend", "torch")
    with launch(tmp_path, *flags, under=under, **places) as server:
        server.wait_ready()
        answer = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=60)
        assert answer.status_code == 200
        server.process.terminate()
        assert server.ends() == 0
        assert "Traceback" not in server.said
    os.rmdir(room)


@pytest.mark.parametrize("way", ["flag", "environment", "file"])
def test_h09_keys_and_prompts_are_in_no_log(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path, way: str
) -> None:
    key, prompt = "sk-do-not-tell", "a whispered prompt"
    (tmp_path / "keys").write_text(f"ann {key}\n")
    flags, environ = {
        "flag": (("--api-key", key), {}),
        "environment": ((), {"OCTAVO_API_KEY": key}),
        "file": (("--api-key-file", str(tmp_path / "keys")), {}),
    }[way]
    more = ("--log-level", "debug", "--enable-log-requests", "--stats-interval", "0.2")
    with launch(tmp_path, str(tiny_path), *flags, *more, **environ) as server:
        server.wait_ready()
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=server.url, timeout=30, headers=headers) as client:
            texts = [client.get("/metrics").text]
            for tokens in (2, "x" + prompt):  # taken, and refused
                body = {"prompt": prompt, "max_tokens": tokens}
                client.post("/v1/completions", json=body)
            client.post(f"/v1/completions?key={key}", json=ASK)
            client.post("/v1/completions", json=ASK, headers={"Authorization": f"Bearer {key}x"})
            texts.append(client.get("/metrics").text)
        lines = [" ".join(process.cmdline()) for process in server.family]
        if way != "flag":  # whose words are the command line
            assert not any(key in line for line in lines)
        assert key not in lines[1]
        server.process.terminate()
        assert server.ends() == 0
        assert "POST" in server.said
        assert not any(key in text or prompt in text for text in (server.said, *texts))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--port", "70000"), "70000"),
        (("--port", "-1"), "port"),
        (("--host", "nowhere.invalid"), "nowhere.invalid"),
        (("--uds", "/nonexistent/socket"), "/nonexistent/socket"),
    ],
)
def test_h11_an_address_that_cannot_be_is_refused_before_anything_is_loaded(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    with launch(tmp_path, str(tiny_path), *flags) as server:
        assert server.ends() == 2
        assert words in server.said
        assert "loading" not in server.said
        assert "Traceback" not in server.said


def test_h11_a_port_in_use_is_named_and_nothing_is_left(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        before = {process.pid for process in psutil.process_iter()}
        with launch(tmp_path, str(tiny_path), "--port", port) as server:
            assert server.ends() != 0
            assert port in server.said
            assert server.said.count("\n") == 1
        mine = [p for p in psutil.process_iter() if p.pid not in before and _serves(p, tiny_path)]
        assert mine == []


def _serves(process: psutil.Process, model: Path) -> bool:
    try:
        return str(model) in process.cmdline()
    except psutil.Error:
        return False


def test_h11_port_zero_is_one_that_is_told(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path
) -> None:
    with launch(tmp_path, str(tiny_path), "--port", "0") as server:
        deadline = time.monotonic() + 60
        while "listening on http" not in server.said:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        url = server.said.partition("listening on ")[2].partition(",")[0]
        assert not url.endswith(":0")
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200


def test_h12_two_servers_have_the_memory_that_each_was_given(
    launch: Callable[..., Any], tiny_path: Path, tmp_path: Path
) -> None:
    """Started together, each has as many blocks as alone: others' memory counts for nothing."""
    flags = (str(tiny_path), "--kv-cache-memory-bytes", "1MiB", "--max-num-seqs", "4")
    with launch(tmp_path, *flags) as one, launch(tmp_path, *flags) as other:
        for server in (one, other):
            server.wait_ready()
        together = [_num_blocks(server.url) for server in (one, other)]
        with launch(tmp_path, *flags) as late:
            late.wait_ready()
            assert [*together, _num_blocks(late.url)] == 3 * [_blocks_of(1 << 20)]


def _num_blocks(url: str) -> int:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    (line,) = (x for x in text.splitlines() if x.startswith("octavo:kv_blocks_total{"))
    return int(float(line.rpartition(" ")[2]))


def _blocks_of(num_bytes: int) -> int:
    """Keys and values of two layers with two heads of 8 float32 numbers, 16 tokens a block."""
    return num_bytes // (2 * 2 * 2 * 8 * 4 * 16)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-cache-memory-bytes", "100"), ("bytes 100 ", "4096 bytes", "available")),
        (("--num-gpu-blocks-override", "2", "--max-model-len", "512"), ("2", "32", "512")),
        (("--gpu-memory-utilization", "1.5"), ("1.5",)),
        (("--gpu-memory-utilization", "0"), ("gpu-memory-utilization",)),
    ],
)
def test_h12_too_little_or_impossible_memory_is_refused_with_the_numbers(
    launch: Callable[..., Any],
    tiny_path: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    with launch(tmp_path, str(tiny_path), *flags) as server:
        assert server.ends() == 2, server.said
        assert [word for word in words if word not in server.said.splitlines()[-1]] == []
        assert "Traceback" not in server.said
