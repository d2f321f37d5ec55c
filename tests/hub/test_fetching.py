"""The engine that waits for its model: what becomes of it when the download or the start goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from octavo.engine.api import Engine
from octavo.engine.checkpoint.hub.fetch import Fetch
from octavo.engine.errors import (
    CheckpointError,
    EngineDeadError,
    EngineNotReadyError,
    EngineRefusedError,
)
from octavo.engine.service.fetching import FetchingEngine


class Download:
    """Tells a third, waits to be ended or released, then gives a path or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.released = threading.Event()
        self.is_stopped = False

    def wait(self, on_progress: Callable[[float], None]) -> Path:
        on_progress(0.3)
        self.released.wait(20)
        if self.is_stopped:
            raise CheckpointError("stopped")
        if self.error is not None:
            raise self.error
        return Path("there")

    def stop(self) -> None:
        self.is_stopped = True
        self.released.set()


class Begun:
    """An engine that only notes what happens to it."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    async def start(self) -> None:
        self.events.append("start")

    async def close(self) -> None:
        self.events.append("close")

    def set_stats_sink(self, sink: Any) -> None:
        self.events.append(sink)

    def check_alive(self) -> None:
        self.events.append("alive")


def fetching(download: Download, begin: Callable[[Path], Any]) -> FetchingEngine:
    return FetchingEngine(cast(Fetch, download), begin)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_the_engine_takes_over() -> None:
    download, begun = Download(), Begun()
    paths: list[Path] = []

    def begin(path: Path) -> Engine:
        paths.append(path)
        return cast(Engine, begun)

    engine = fetching(download, begin)
    engine.set_stats_sink(cast(Any, "sink"))
    await engine.start()
    await until(lambda: engine.progress.fraction == 0.3)
    assert engine.progress.stage == "downloading"
    engine.check_alive()
    for ask in (engine.check_ready, lambda: engine.info, engine.tokenizer_info):
        with pytest.raises(EngineNotReadyError, match="downloaded"):
            ask()
    assert engine.stats() is None
    download.released.set()
    await until(lambda: "start" in begun.events)
    assert paths == [Path("there")]
    assert begun.events[:2] == ["sink", "start"]
    await engine.close()
    assert begun.events[-1] == "close"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "kind"),
    [(CheckpointError("no such model"), EngineRefusedError), (OSError("odd"), EngineDeadError)],
)
@pytest.mark.parametrize("place", ["download", "start"])
async def test_what_goes_wrong_is_told_and_nobody_waits_for_ever(
    error: Exception, kind: type[Exception], place: str
) -> None:
    def begin(_path: Path) -> Engine:
        raise error

    download = Download(error if place == "download" else None)
    engine = fetching(download, begin)
    await engine.start()
    download.released.set()
    async with asyncio.timeout(20):
        await engine.wait_dead()
    with pytest.raises(kind, match=str(error)):
        engine.check_alive()
    await engine.close()


@pytest.mark.anyio
async def test_closing_ends_the_download_and_is_no_death() -> None:
    engine = fetching(Download(), lambda _path: pytest.fail("nothing is to be started"))
    await engine.start()
    await until(lambda: engine.progress.fraction == 0.3)
    async with asyncio.timeout(20):
        await engine.close()
    engine.check_alive()
    with pytest.raises(EngineNotReadyError, match="shutting down"):
        engine.check_ready()


@pytest.mark.anyio
async def test_an_engine_that_starts_while_all_is_closed_is_closed_too() -> None:
    download, begun = Download(), Begun()
    is_beginning, may_begin = threading.Event(), threading.Event()

    def begin(_path: Path) -> Engine:
        is_beginning.set()
        may_begin.wait(20)
        return cast(Engine, begun)

    engine = fetching(download, begin)
    await engine.start()
    download.released.set()
    await until(is_beginning.is_set)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0.01)
    may_begin.set()
    async with asyncio.timeout(20):
        await closing
    assert begun.events == ["close"]
