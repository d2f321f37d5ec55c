"""One engine process as the front end has it: its start, the socket to it, its signs of life, its end.

A new socket and a new number (epoch) for each, so that nothing of an earlier one can arrive late. Must not
know requests.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from ..config.engine_config import EngineConfig
from ..config.environment import engine_environment
from ..config.supervision import Supervision
from .frames import ToEngine, encode
from .process import Launch, pack_launch
from .vital_signs import Signs, SignsReader, Watch, make_page

EXIT_TIMEOUT_S = 2.0
LAST_FRAMES_S = 0.1
"""What a process has sent before its end is read that long after it."""
MAX_LOOK_INTERVAL_S = 1.0
LOOKS_PER_TIMEOUT = 8
MAX_FOLDER_CHARS = 80
"""Unix sockets' names have about 100 characters at most."""


class EngineLife:
    """Starts an engine process.

    Args:
        context: of the socket.
        config: for the engine.
        command: starts the process.
        log_level: of the process.
        epoch: the life's number.

    Raises:
        OSError, zmq.ZMQError: the process, or the way to it, cannot be had.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: EngineConfig,
        command: list[str],
        log_level: str,
        epoch: int,
    ) -> None:
        self.epoch = epoch
        self.begin = time.monotonic()
        self.folder = _socket_folder()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        try:
            page = make_page()
            try:
                self._signs = SignsReader(page)
                self.process = self._spawn(config, command, log_level, page)
            finally:
                os.close(page)
        except (OSError, zmq.ZMQError):
            self._release()
            raise

    def _spawn(
        self, config: EngineConfig, command: list[str], log_level: str, page: int
    ) -> subprocess.Popen[bytes]:
        endpoint = f"ipc://{self.folder}/engine-{self.epoch}.sock"
        self.socket.set_hwm(0)
        self.socket.linger = 0
        self.socket.bind(endpoint)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=engine_environment(config), pass_fds=(page,)
        )
        if process.stdin is not None:
            launch = Launch(config, endpoint, self.epoch, log_level, page)
            with suppress(BrokenPipeError):  # dead already, of which the watch will hear
                process.stdin.write(pack_launch(launch))
                process.stdin.flush()
        return process

    def attach(
        self,
        supervision: Supervision,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[EngineLife, str], None],
    ) -> None:
        """Have frames delivered on the running event loop, and be told why it ended, once.

        A process that is stuck is killed, and has ended then.
        """
        self._loop = asyncio.get_running_loop()
        self._on_frame, self._on_end = on_frame, on_end
        self._loop.add_reader(self.socket.FD, self.drain)
        self._loop.call_soon(self.drain)
        self._stuck: str | None = None
        self._watching = asyncio.create_task(self._watch_signs(supervision))
        threading.Thread(target=self._watch_process, name="watch-engine", daemon=True).start()

    def _watch_process(self) -> None:
        status = self.process.wait()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(loop.call_later, LAST_FRAMES_S, self._ended, status)

    def _ended(self, status: int) -> None:
        if self.socket.closed:
            return
        self.drain()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        reason = f"The engine process ended {how}."
        if self._stuck is not None:
            reason = f"The engine process {self._stuck}, and was killed."
        self._on_end(self, reason)

    async def _watch_signs(self, supervision: Supervision) -> None:
        least = min(supervision.heartbeat_timeout_s, supervision.step_timeout_s)
        interval_s = min(MAX_LOOK_INTERVAL_S, least / LOOKS_PER_TIMEOUT)
        watch = Watch(supervision.heartbeat_timeout_s, supervision.step_timeout_s, interval_s)
        while self._stuck is None:
            await asyncio.sleep(interval_s)
            self._stuck = watch.look(*self._signs.glance())
        self.process.kill()

    def last_signs(self) -> Signs:
        """What the process has left behind. Call after its end."""
        return self._signs.look()

    def send(self, frame: ToEngine) -> None:
        """Hand a frame to the socket; never waits, since its queue has no bound of its own.

        Between the end of the process and the news of it a frame is lost, as those are that it has not read.
        """
        if not self.socket.closed:
            with suppress(zmq.Again):  # nobody is connected any more
                self.socket.send(encode(frame), zmq.DONTWAIT)
            if self._loop is not None:
                self._loop.call_soon(self.drain)  # a send may swallow the readable edge

    def drain(self) -> None:
        while not self.socket.closed:
            try:
                data = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_frame(data)

    def hide(self) -> None:
        """Both sides are connected: the socket needs no name any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        self.process.kill()

    async def close(self) -> None:
        """End the process, whatever it is doing, and forget the socket. Nothing is told any more."""
        self._release()
        if self.process.stdin is not None:
            self.process.stdin.close()  # upon which the engine ends
        try:
            await asyncio.to_thread(self.process.wait, EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        self._signs.close()

    def _release(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if not self.socket.closed:
            if self._loop is not None:
                self._loop.remove_reader(self.socket.FD)
            self.socket.close()
        self.hide()


def _socket_folder() -> Path:
    """A new folder with mode 0700, its path short enough for the name of a socket."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    if len(str(folder)) > MAX_FOLDER_CHARS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="octavo-", dir="/tmp"))
    return folder
