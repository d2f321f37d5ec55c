"""Log lines: their forms, the statistics, the flight recorder, and that they tell no secret."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from octavo.engine import logs
from octavo.engine.config.server_config import ServerConfig
from octavo.engine.stats import EngineStats
from octavo.server.app import create_app
from octavo.server.banner import Console, LoggedLines
from octavo.server.flight_recorder import NUM_DUMPED, FlightRecorder
from octavo.server.stats_line import StatsLine

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

SECRET = "sk-hush"
PROMPT = "whispered"


def record(message: str, exc_info: bool = False) -> logging.LogRecord:
    info = sys.exc_info() if exc_info else None
    return logging.LogRecord("octavo.x", logging.WARNING, "x.py", 1, message, (), info)


def test_a_json_line_is_one_object() -> None:
    formatter = logs._Json("server")
    line = json.loads(formatter.format(record('a "b"\nc')))
    assert (line["level"], line["process"], line["logger"]) == ("warning", "server", "octavo.x")
    assert line["message"] == 'a "b"\nc'
    assert line["time"].endswith("+00:00")
    assert "request_id" not in line
    try:
        raise RuntimeError("broke")
    except RuntimeError:
        text = formatter.format(record("a", exc_info=True))
    assert "\n" not in text
    assert "RuntimeError: broke" in json.loads(text)["exception"]


def test_a_path_makes_no_line_of_its_own() -> None:
    """One with a line's end in it could write a line that octavo did not."""
    text = logs._Text("server").format(record("a\n2026 ERROR b\r\x1b[2J\x85\u2028\x7fé"))
    assert text.endswith(r"octavo.x: a\n2026 ERROR b\r\x1b[2J\x85\u2028\x7fé")
    try:
        raise RuntimeError("broke")
    except RuntimeError:
        lines = logs._Text("server").format(record("a", exc_info=True)).splitlines()
    assert lines[-1] == "RuntimeError: broke"


def test_what_is_for_a_terminal_becomes_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Console(LoggedLines()).write("octavo is ready\n  URL  x\n\n")
    assert [r.message for r in caplog.records] == ["octavo is ready", "URL  x"]


@pytest.mark.anyio
async def test_a_request_is_logged_with_its_id_and_nothing_that_it_says(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    root = logging.getLogger("octavo")
    engine.pieces = ["answered"]
    for formatter in (logs._Text("server"), logs._Json("server")):
        handler.setFormatter(formatter)
        root.addHandler(handler)
        level = root.level
        root.setLevel(logging.DEBUG)
        try:
            config = ServerConfig(api_key=(SECRET,), enable_log_requests=True)
            transport = httpx.ASGITransport(create_app(engine, config, ("tiny",)))
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
                headers = {"Authorization": f"Bearer {SECRET}", "X-Request-Id": "mine"}
                path = f"/v1/completions?key={SECRET}"
                await client.post(path, json={"prompt": PROMPT}, headers=headers)
                await client.post(path, json={"prompt": PROMPT})
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
    text = capsys.readouterr().err
    good, bad, good_json, _ = text.splitlines()
    assert "POST /v1/completions 200 in " in good
    assert good.endswith(" for #1 [mine]")
    assert "401" in bad
    assert json.loads(good_json)["request_id"] == "mine"
    for secret in (SECRET, PROMPT, "answered"):
        assert secret not in text


def test_the_line_of_statistics_tells_rates_and_is_silent_when_nothing_happens() -> None:
    line = StatsLine(0.0)
    assert line.of(EngineStats(), 10.0) is None
    busy = EngineStats(
        num_steps=5, num_running=2, num_blocks=10, num_used_blocks=3, num_prompt_tokens=50,
        num_generation_tokens=200, prefix_cache_queries=40, prefix_cache_hits=10,
    )  # fmt: skip
    text = line.of(busy, 20.0)
    assert text == (
        "running 2, waiting 0, KV blocks used 30.0%, prompt 5.0 tokens/s, generation 20.0 tokens/s, "
        "prefix hits 25.0%, preemptions 0, steps 5"
    )
    assert "generation 0.0 tokens/s" in str(line.of(busy, 30.0))
    reborn = EngineStats(epoch=1, num_steps=1, num_running=1, num_generation_tokens=30)
    assert "generation 3.0 tokens/s" in str(line.of(reborn, 40.0))
    ended = EngineStats(epoch=1, num_steps=1, num_generation_tokens=30)
    assert line.of(ended, 50.0) is None


def test_the_recorder_keeps_the_last_steps_and_logs_them_when_another_engine_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = FlightRecorder(NUM_DUMPED + 10)
    for i in range(1, 100):
        recorder.note(EngineStats(num_steps=i, num_used_blocks=i))
    kept = recorder.steps()
    assert [step["step"] for step in kept] == list(range(100 - NUM_DUMPED - 10, 100))
    recorder.note(EngineStats(epoch=1))
    assert recorder.steps() == []
    lines = [json.loads(r.message) for r in caplog.records if r.message.startswith("{")]
    assert [line["step"] for line in lines] == list(range(100 - NUM_DUMPED, 100))
    recorder.note(EngineStats(epoch=1, num_steps=1, num_used_blocks=2))
    assert [(s["step"], s["epoch"], s["num_used_blocks"]) for s in recorder.steps()] == [(1, 1, 2)]
