"""An engine whose model is still being fetched from the Hub: alive, not ready, then the engine itself.

Owns the time before there is an engine process. Everything after it is the engine's own business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..api import (
    Engine,
    EngineInfo,
    GenerationRequest,
    KVSnapshot,
    LoadProgress,
    Prompt,
    RenderedRequest,
    RequestStream,
)
from ..checkpoint.hub.fetch import Fetch
from ..errors import ConfigError, EngineDeadError, EngineNotReadyError, EngineRefusedError
from ..stats import EngineStats, StatsSink

logger = logging.getLogger(__name__)


class FetchingEngine(Engine):
    """Fetches a model, starts an engine with it, and passes everything on to that engine.

    Args:
        fetch: the download, which runs already.
        begin: starts the engine's process for the model at a path; called on a thread.
    """

    def __init__(self, fetch: Fetch, begin: Callable[[Path], Engine]) -> None:
        self._fetch = fetch
        self._begin = begin
        self._engine: Engine | None = None
        self._progress = LoadProgress("downloading", 0.0)
        self._sink: StatsSink | None = None
        self._death: EngineDeadError | None = None
        self._is_closing = False
        self._decided = asyncio.Event()  # there is an engine, or there will be none
        self._task: asyncio.Task[None] | None = None

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See :meth:`octavo.engine.api.Engine.start`."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            path = await asyncio.to_thread(self._fetch.wait, self._note)
            self._progress = LoadProgress("starting", 0.0)
            engine = await asyncio.to_thread(self._begin, path)
        except ConfigError as error:
            self._fail(EngineRefusedError(str(error)))
            return
        except Exception as error:
            logger.exception("the engine cannot be started")
            self._fail(EngineDeadError(f"{type(error).__name__}: {error}"))
            return
        if self._is_closing:
            await engine.close()
            return
        if self._sink is not None:
            engine.set_stats_sink(self._sink)
        await engine.start()
        self._engine = engine
        self._decided.set()

    def _fail(self, death: EngineDeadError) -> None:
        if not self._is_closing:  # which ends the download, too
            self._death = death
            self._decided.set()

    def _note(self, fraction: float) -> None:
        """Called on the thread that follows the download."""
        self._progress = LoadProgress("downloading", fraction)

    async def wait_dead(self) -> None:
        """See :meth:`octavo.engine.api.Engine.wait_dead`."""
        await self._decided.wait()
        if self._engine is not None:
            await self._engine.wait_dead()

    async def close(self) -> None:
        """See :meth:`octavo.engine.api.Engine.close`."""
        self._is_closing = True
        self._fetch.stop()
        if self._task is not None:
            await self._task
        if self._engine is not None:
            await self._engine.close()

    # --- state -----------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """See :attr:`octavo.engine.api.Engine.info`."""
        return self._begun().info

    @property
    def progress(self) -> LoadProgress:
        """See :attr:`octavo.engine.api.Engine.progress`."""
        return self._progress if self._engine is None else self._engine.progress

    def check_alive(self) -> None:
        """See :meth:`octavo.engine.api.Engine.check_alive`."""
        if self._death is not None:
            raise self._death
        if self._engine is not None:
            self._engine.check_alive()

    def check_ready(self) -> None:
        """See :meth:`octavo.engine.api.Engine.check_ready`."""
        self._begun().check_ready()

    def check_accepting(self) -> None:
        """See :meth:`octavo.engine.api.Engine.check_accepting`."""
        self._begun().check_accepting()

    @property
    def num_restarts(self) -> int:
        """See :attr:`octavo.engine.api.Engine.num_restarts`."""
        return 0 if self._engine is None else self._engine.num_restarts

    def _begun(self) -> Engine:
        self.check_alive()
        if self._is_closing:
            raise EngineNotReadyError("The server is shutting down.")
        if self._engine is None:
            raise EngineNotReadyError("The model is still being downloaded.")
        return self._engine

    def stats(self) -> EngineStats | None:
        """See :meth:`octavo.engine.api.Engine.stats`."""
        return None if self._engine is None else self._engine.stats()

    def set_stats_sink(self, sink: StatsSink) -> None:
        """See :meth:`octavo.engine.api.Engine.set_stats_sink`."""
        self._sink = sink
        if self._engine is not None:
            self._engine.set_stats_sink(sink)

    # --- what only an engine can do --------------------------------------------------------------

    async def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[RequestStream]:
        """See :meth:`octavo.engine.api.Engine.submit`."""
        return await self._begun().submit(requests)

    async def render(self, requests: Sequence[GenerationRequest]) -> list[RenderedRequest]:
        """See :meth:`octavo.engine.api.Engine.render`."""
        return await self._begun().render(requests)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """See :meth:`octavo.engine.api.Engine.tokenize`."""
        return await self._begun().tokenize(prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See :meth:`octavo.engine.api.Engine.detokenize`."""
        return await self._begun().detokenize(token_ids)

    async def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        """See :meth:`octavo.engine.api.Engine.vocabulary_entries`."""
        return await self._begun().vocabulary_entries(token_ids)

    def tokenizer_info(self) -> Mapping[str, Any]:
        """See :meth:`octavo.engine.api.Engine.tokenizer_info`."""
        return self._begun().tokenizer_info()

    async def kv_snapshot(self) -> KVSnapshot:
        """See :meth:`octavo.engine.api.Engine.kv_snapshot`."""
        return await self._begun().kv_snapshot()

    async def reset_prefix_cache(self) -> None:
        """See :meth:`octavo.engine.api.Engine.reset_prefix_cache`."""
        await self._begun().reset_prefix_cache()
