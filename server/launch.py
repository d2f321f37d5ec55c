"""Starts and ends the server: the one place that joins the HTTP side to a real engine.

The order is the point. The socket is bound first, so that a port in use is reported before anything
is loaded and early clients queue. Then the engine process is started, and only then are the web
libraries imported, while the model loads. The port answers during the load: alive, not ready.

Ends in three ways. A first signal refuses new generation, gives running requests their time, closes
the engine and exits with 0; a second one waits for nothing. If the engine dies, live streams get
their error and the process exits with 1.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import socket
import ssl
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.config import EngineConfig, ServerConfig
from ..engine.errors import EngineDeadError, EngineRefusedError, OctavoError
from .banner import Console, banner, watch_progress
from .drain import Drain
from .listening import listening, tls_context, url_of

if TYPE_CHECKING:
    import uvicorn

    from ..engine.api import Engine

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"
EXIT_DEAD = 1
EXIT_REFUSED = 2
KEEP_ALIVE_S = 75  # longer than the usual load balancer's 60
CLOSE_TIMEOUT_S = 10.0  # for the engine to end its requests and itself
FLUSH_TIMEOUT_S = 5  # for last events to reach their clients
DEAD_LINGER_S = 0.5  # the port answers 503 that long after the engine's death
SECOND_SIGNAL_S = 1.0

logger = logging.getLogger(__name__)


def run(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal or the engine's death.

    Returns:
        The process's exit code.

    Raises:
        ConfigError: the port cannot be bound, or the model cannot be opened.
    """
    _set_up_logging(server_config.log_level)
    names = model_names(engine_config.model.model, server_config)
    tls = tls_context(server_config)
    with listening(server_config) as listener:
        from ..engine.build import start_engine

        engine = start_engine(engine_config, server_config.log_level)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            console = Console(sys.stderr)
            return runner.run(serve(engine, listener, server_config, names, console, tls))


def model_names(model: str | None, config: ServerConfig) -> tuple[str, ...]:
    """The served names: as configured, else the folder's or file's name."""
    if config.served_model_name:
        return config.served_model_name
    if model is None:
        return (EMBEDDED_MODEL_NAME,)
    path = Path(model).resolve()
    return (re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.name),)


async def serve(
    engine: Engine,
    listener: socket.socket,
    config: ServerConfig,
    names: tuple[str, ...],
    out: Console,
    tls: ssl.SSLContext | None = None,
) -> int:
    """Answer on ``listener`` until a signal or the engine's death, then end the engine.

    Args:
        engine: Not yet attached to this event loop; may still be loading.
        listener: A listening socket; closed at the end.
        config: The HTTP side's options.
        names: Served model names.
        out: Where progress and the banner go.
        tls: Speaks HTTPS with it.

    Returns:
        The exit code.
    """
    signals = _Signals(asyncio.get_running_loop())
    await engine.start()
    drain = Drain()
    server = _make_server(engine, config, names, drain, tls)
    url = url_of(config, listener)
    out.write(f"octavo: listening on {url}, loading {names[0]}\n")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    died = asyncio.create_task(engine.wait_dead())
    announced = asyncio.create_task(_announce(engine, config, names[0], url, out))
    stopped = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({serving, died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        announced.cancel()
        if not died.done() and not serving.done():
            await _drain(drain, signals, died, config.shutdown_timeout)
        return await _end(engine, server, serving, is_dead=died.done(), out=out)
    finally:
        for task in (announced, died, stopped, serving):
            task.cancel()
        await asyncio.gather(announced, died, stopped, serving, return_exceptions=True)
        signals.restore()


class _Signals:
    """SIGINT and SIGTERM as events; the second one also sets a deadline on the whole process."""

    _HANDLED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = loop
        for number in self._HANDLED:
            loop.add_signal_handler(number, self._received)

    def restore(self) -> None:
        for number in self._HANDLED:
            self._loop.remove_signal_handler(number)

    def _received(self) -> None:
        if self.first.is_set():
            self.second.set()
            self._loop.call_later(SECOND_SIGNAL_S, os._exit, 130)
        self.first.set()


def _make_server(
    engine: Engine,
    config: ServerConfig,
    names: tuple[str, ...],
    drain: Drain,
    tls: ssl.SSLContext | None,
) -> uvicorn.Server:
    import uvicorn

    from .app import create_app
    from .protocol import HeaderLimitProtocol

    class Server(uvicorn.Server):
        """Leaves the signals to :func:`serve`."""

        def capture_signals(self) -> Any:
            return nullcontext()

    app = create_app(engine, config, names, drain=drain)
    http = uvicorn.Config(
        app,
        http=HeaderLimitProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
    )
    http.load()
    http.ssl = tls
    return Server(http)


async def _announce(
    engine: Engine, config: ServerConfig, model_name: str, url: str, out: Console
) -> None:
    try:
        await watch_progress(engine, out)
    except EngineDeadError:
        return  # said by the end of serve
    gc.collect()
    gc.freeze()  # libraries, routes and tokenizer stay: a collection need not visit them, nor hold up the loop
    needs_key = bool(config.api_key)
    out.write(banner(engine.info, model_name, url, needs_key=needs_key))


async def _drain(
    drain: Drain, signals: _Signals, died: asyncio.Task[None], timeout_s: float
) -> None:
    """Refuse new requests and wait for running ones, as long as there is a point in waiting."""
    drain.is_draining = True
    waits = {asyncio.create_task(drain.wait_idle()), asyncio.create_task(signals.second.wait())}
    await asyncio.wait({*waits, died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()


async def _end(
    engine: Engine,
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    *,
    is_dead: bool,
    out: Console,
) -> int:
    """End the engine, let last events out, stop listening."""
    code = 0
    if is_dead:
        code = _report_death(engine, out)
        await asyncio.sleep(DEAD_LINGER_S)
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await engine.close()
    except TimeoutError:
        logger.error("The engine did not end within %.0f s.", CLOSE_TIMEOUT_S)
    server.should_exit = True
    await serving
    return code


def _report_death(engine: Engine, out: Console) -> int:
    """Say why the engine ended. Returns the exit code."""
    code, reason = EXIT_DEAD, "the engine ended"
    try:
        engine.check_alive()
    except EngineRefusedError as error:
        code, reason = EXIT_REFUSED, str(error)
    except OctavoError as error:
        reason = str(error) or reason
    out.write(f"octavo: {reason}\n")
    return code


def _set_up_logging(level: str) -> None:
    """Plain lines on stderr. The HTTP server's own remarks count only as warnings."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
