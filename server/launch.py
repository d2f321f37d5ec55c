"""Starts and ends the server: the one place that joins the HTTP side to a real engine.

The order is the point. The socket is bound first, so that a port in use is reported before anything
is loaded and early clients queue. Then the engine process is started, and only then are the web
libraries imported, while the model loads. The port answers during the load: alive, not ready.

Ends in three ways. A first signal makes the server not ready, refuses new generation after a while, gives running
requests their time, closes the engine and exits with 0; a second one waits for nothing. If the engine dies once too often,
live streams get their error and the process exits with 1.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.config.engine_config import EngineConfig
from ..engine.config.server_config import ServerConfig
from ..engine.config.supervision import Supervision
from ..engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineNotReadyError,
    EngineRefusedError,
    OctavoError,
)
from ..engine.logs import one_line, set_up_logging
from .api_keys import ApiKeys, api_keys
from .banner import Console, LoggedLines, banner, watch_progress
from .drain import Drain
from .flight_recorder import FlightRecorder
from .listening import listening, tls_context, url_of
from .stats_line import log_stats

if TYPE_CHECKING:
    import uvicorn

    from ..engine.api import Engine, LocalModel

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
        ConfigError: the port cannot be bound, or the model or a file of keys cannot be opened.
    """
    _set_up_logging(server_config.log_level, engine_config.execution.log_format)
    _allow_many_connections()
    tls, keys = tls_context(server_config), api_keys(server_config)
    with listening(server_config) as listener:
        from ..engine.build import start_engine

        names = model_names(engine_config.model.model, server_config)
        supervision = Supervision(
            server_config.max_engine_restarts,
            server_config.engine_heartbeat_timeout,
            server_config.engine_step_timeout,
        )
        engine = start_engine(engine_config, server_config.log_level, supervision)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            is_json = engine_config.execution.log_format == "json"
            console = Console(LoggedLines() if is_json else sys.stderr)
            return runner.run(serve(engine, listener, server_config, names, console, tls, keys))


def model_names(model: str | None, config: ServerConfig) -> tuple[str, ...]:
    """The served names: as configured, else the folder's or file's name, or that of the Hub as given.

    Raises:
        ConfigError: that of the folder or file holds control characters.
    """
    if config.served_model_name:
        return config.served_model_name
    if model is None:
        return (EMBEDDED_MODEL_NAME,)
    from ..engine.build import is_on_hub

    if is_on_hub(model):
        return (model,)
    name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", Path(model).resolve().name)
    if not name.isprintable():
        raise ConfigError(
            f"The model's name is not printable, on one line: {name!r}; give --served-model-name."
        )
    return (name,)


def list_models(paths: Sequence[str], download_dir: str | None) -> list[LocalModel]:
    """The models of this machine, and whether they fit it."""
    from ..engine.build import list_models

    return list_models(paths, download_dir)


async def serve(
    engine: Engine,
    listener: socket.socket,
    config: ServerConfig,
    names: tuple[str, ...],
    out: Console,
    tls: ssl.SSLContext | None = None,
    keys: ApiKeys | None = None,
) -> int:
    """Answer on ``listener`` until a signal or the engine's death, then end the engine.

    Args:
        engine: Not yet attached to this event loop; may still be loading.
        listener: A listening socket; closed at the end.
        config: The HTTP side's options.
        names: Served model names.
        out: Where progress and the banner go.
        tls: Speaks HTTPS with it.
        keys: That clients need; if they are not given, those of ``config``.

    Returns:
        The exit code.
    """
    keys = keys or api_keys(config)
    has_file = keys is not None and config.api_key_file is not None
    signals = _Signals(asyncio.get_running_loop(), keys.reload if keys and has_file else None)
    await engine.start()
    drain = Drain()
    recorder = FlightRecorder(config.flight_recorder_steps)
    server = _make_server(engine, config, names, drain, tls, keys, recorder)
    url = url_of(config, listener)
    out.write(f"octavo: listening on {one_line(url)}, loading {names[0]}\n")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    died = asyncio.create_task(engine.wait_dead())
    announced = asyncio.create_task(_announce(engine, config, names[0], url, out))
    stopped = asyncio.create_task(signals.first.wait())
    helpers: list[asyncio.Task[Any]] = [announced, died, stopped, serving]
    if config.stats_interval:
        helpers.append(asyncio.create_task(log_stats(engine, config.stats_interval)))
    try:
        await asyncio.wait({serving, died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        announced.cancel()
        if not died.done() and not serving.done():
            delay_s = config.drain_delay if signals.is_orderly and _is_accepting(engine) else 0.0
            await _drain(drain, signals, died, delay_s, config.shutdown_timeout)
        if died.done():
            recorder.dump()
        return await _end(engine, server, serving, is_dead=died.done(), out=out)
    finally:
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        signals.restore()


class _Signals:
    """SIGINT and SIGTERM as events; the second one also sets a deadline on the whole process.

    Args:
        on_hangup: Called upon SIGHUP, which otherwise ends the process as usual.
    """

    _HANDLED = (signal.SIGINT, signal.SIGTERM)

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_hangup: Callable[[], None] | None
    ) -> None:
        self.first = asyncio.Event()
        self.is_orderly = False  # the first one was an orchestrator's, not a person's Ctrl-C
        self.second = asyncio.Event()
        self._loop = loop
        for number in self._HANDLED:
            loop.add_signal_handler(number, self._received, number)

        if on_hangup is not None:
            loop.add_signal_handler(signal.SIGHUP, on_hangup)

    def restore(self) -> None:
        for number in (*self._HANDLED, signal.SIGHUP):
            self._loop.remove_signal_handler(number)

    def _received(self, number: int) -> None:
        if self.first.is_set():
            self.second.set()
            self._loop.call_later(SECOND_SIGNAL_S, os._exit, 130)
        else:
            self.is_orderly = number == signal.SIGTERM
        self.first.set()


def _make_server(
    engine: Engine,
    config: ServerConfig,
    names: tuple[str, ...],
    drain: Drain,
    tls: ssl.SSLContext | None,
    keys: ApiKeys | None,
    recorder: FlightRecorder,
) -> uvicorn.Server:
    import uvicorn

    from .app import create_app
    from .protocol import HeaderLimitProtocol

    class Server(uvicorn.Server):
        """Leaves the signals to :func:`serve`."""

        def capture_signals(self) -> Any:
            return nullcontext()

    class Protocol(HeaderLimitProtocol):
        head_timeout_s = config.client_stall_timeout

    app = create_app(engine, config, names, drain=drain, keys=keys, recorder=recorder)
    http = uvicorn.Config(
        app,
        http=Protocol,
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
    needs_key = bool(config.api_key or config.api_key_file)
    out.write(banner(engine.info, model_name, url, needs_key=needs_key))


async def _drain(
    drain: Drain,
    signals: _Signals,
    died: asyncio.Task[None],
    delay_s: float,
    timeout_s: float,
) -> None:
    """Take new requests for a while, then refuse them and wait for running ones, if there is a point in it."""
    drain.announce()
    hurry, first = asyncio.create_task(signals.second.wait()), asyncio.FIRST_COMPLETED
    await asyncio.wait({hurry, died}, timeout=delay_s, return_when=first)
    drain.is_draining = True
    idle = asyncio.create_task(drain.wait_idle())
    await asyncio.wait({idle, hurry, died}, timeout=timeout_s, return_when=first)
    for task in (idle, hurry):
        task.cancel()


def _is_accepting(engine: Engine) -> bool:
    try:
        engine.check_accepting()
    except (EngineNotReadyError, EngineDeadError):
        return False
    return True


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
    out.write(f"octavo: {one_line(reason)}\n")
    return code


def _allow_many_connections() -> None:
    """As many open files as may be: the usual limit, 1024, is one that a process may lift itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(
            ValueError, OSError
        ):  # more than the system allows, where there is no hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_up_logging(level: str, form: str) -> None:
    """Lines on stderr. The HTTP server's own remarks count only as warnings."""
    set_up_logging(level, form, "server")
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
