"""The engine processes of a front end, one after the other.

Owns which of them is there, and starts the next. Whether there is to be a next one is decided elsewhere. Must not
know requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import zmq

from ..config.engine_config import EngineConfig
from ..config.supervision import Supervision
from ..errors import ConfigError, EngineDeadError
from .engine_life import EngineLife
from .frames import ToEngine
from .supervisor import Supervisor

logger = logging.getLogger(__name__)

RESTARTING = "The engine is being started again."


class EngineLives:
    """Starts the first engine process.

    Args:
        config: for the engine.
        command: starts the process.
        log_level: of the process.
        supervision: when a process is stuck.
        supervisor: counts the starts that fail.

    Raises:
        ConfigError: the process cannot be started.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: list[str],
        log_level: str,
        supervision: Supervision,
        supervisor: Supervisor,
    ) -> None:
        self._config = config
        self._command = command
        self._log_level = log_level
        self._supervision = supervision
        self._supervisor = supervisor
        self._context = zmq.Context()
        try:
            self.current = self._spawn(epoch=0)
        except ConfigError:
            self._context.term()
            raise
        self.is_up = False  # the engine takes requests
        self.num_restarts = 0
        self._restarting: asyncio.Task[None] | None = None

    def _spawn(self, epoch: int) -> EngineLife:
        try:
            return EngineLife(self._context, self._config, self._command, self._log_level, epoch)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"The engine process cannot be started: {error}.") from error

    def attach(
        self,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[EngineLife, str], None],
        give_up: Callable[[EngineDeadError], None],
    ) -> None:
        """Have frames and ends of all lives told, and that no other process can be started."""
        self._on_frame, self._on_end, self._give_up = on_frame, on_end, give_up
        self.current.attach(self._supervision, on_frame, on_end)

    def up(self, num_blocks: int) -> None:
        """The engine takes requests, and has so many blocks."""
        cache = replace(self._config.cache, num_gpu_blocks_override=num_blocks)
        self._config = replace(self._config, cache=cache)  # what fits now fits the next engine
        self.is_up = True

    def send(self, frame: ToEngine) -> None:
        """Hand a frame to the engine, if there is one; never waits."""
        if self.is_up:
            self.current.send(frame)

    def restart(self, delay_s: float) -> None:
        """Start another process after the current one has ended. Does not wait."""
        self.num_restarts += 1
        self._restarting = asyncio.create_task(self._restart(self.current, delay_s))

    async def _restart(self, last: EngineLife, delay_s: float) -> None:
        try:
            await last.close()
            self.current = await self._start_again(last.epoch + 1, delay_s)
            self.current.attach(self._supervision, self._on_frame, self._on_end)
        except Exception as error:
            logger.exception("the engine cannot be started again")
            self._give_up(EngineDeadError(f"{type(error).__name__}: {error}"))

    async def _start_again(self, epoch: int, delay_s: float) -> EngineLife:
        while True:
            await asyncio.sleep(delay_s)
            try:
                return self._spawn(epoch)
            except ConfigError as error:  # no file, no memory: it may come back
                logger.error("%s", error)
                verdict = self._supervisor.died(())
                if verdict.is_over:
                    raise
                delay_s = verdict.delay_s

    async def close(self) -> None:
        """End the process, and start no other one."""
        if self._restarting is not None:
            self._restarting.cancel()
        await self.current.close()
        self._context.term()
