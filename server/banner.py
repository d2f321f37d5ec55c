"""What a person at the terminal reads while octavo starts. Writes to stderr, never a key."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import shlex
from contextlib import suppress
from typing import TextIO

from ..engine.api import Engine, EngineInfo, LoadProgress
from ..engine.errors import EngineNotReadyError
from ..engine.logs import one_line

POLL_S = 0.1
_LABEL_WIDTH = 18

logger = logging.getLogger(__name__)


class LoggedLines(io.TextIOBase):
    """What is for a terminal, as lines of the log: where every line has to be one."""

    def write(self, text: str) -> int:
        """Log the lines of ``text`` that are not blank."""
        for line in filter(None, map(str.strip, text.splitlines())):
            logger.info("%s", line)
        return len(text)


class Console:
    """Standard error, or nothing where it is closed or full: that is no reason to end a server."""

    def __init__(self, stream: TextIO | LoggedLines | None) -> None:
        self._stream = stream
        self.is_terminal = stream is not None and stream.isatty()

    def write(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # ValueError: closed
                self._stream.write(text)
                self._stream.flush()


async def watch_progress(engine: Engine, out: Console) -> None:
    """Show how the load goes; return when the engine is ready.

    A terminal gets one line that changes, anything else a line per stage, and per tenth of a download.

    Raises:
        EngineDeadError: loading failed.
    """
    said = ""
    try:
        while not _is_ready(engine):
            progress = engine.progress
            if out.is_terminal:
                out.write(f"\r\x1b[Koctavo: {progress.stage} {progress.fraction:4.0%}")
            elif said != (text := _stage_text(progress)):
                said = text
                out.write(f"octavo: {said}\n")
            await asyncio.sleep(POLL_S)
    finally:
        if out.is_terminal:
            out.write("\r\x1b[K")


def _stage_text(progress: LoadProgress) -> str:
    if progress.stage != "downloading" or progress.fraction < 0.1:
        return progress.stage
    return f"downloading {int(progress.fraction * 10) * 10}%"


def _is_ready(engine: Engine) -> bool:
    try:
        engine.check_ready()
    except EngineNotReadyError:
        return False
    return True


def base_url(host: str, port: int) -> str:
    """The URL to try from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(info: EngineInfo, model_name: str, url: str, *, needs_key: bool) -> str:
    """The lines that say what is served, and how to ask."""
    rows = {
        "model": f"{model_name} ({info.architecture}, {_millions(info.num_parameters)} parameters)",
        "computed in": f"{info.dtype} on {info.device}, {info.num_threads} threads, "
        f"{info.attention_backend} kernels",
        "KV cache": f"{_kv_blocks(info)} ({info.kv_cache_bytes / (1 << 30):.2f} GiB)",
        "window": f"{info.max_model_len} tokens; up to {info.max_num_seqs} sequences and "
        f"{info.max_num_batched_tokens} tokens a step",
        "loaded in": f"{info.load_s:.1f} s",
        "URL": url,
    }
    lines = [f"  {label:<{_LABEL_WIDTH}}{one_line(text)}" for label, text in rows.items()]
    return "\n".join(["octavo is ready", *lines, "", curl_line(model_name, url, needs_key), ""])


def _kv_blocks(info: EngineInfo) -> str:
    blocks = f"{info.num_blocks} blocks x {info.block_size} tokens"
    if len(info.kv_windows) > 1:
        blocks += f" of one of {len(info.kv_windows)} groups of layers"
    return f"{blocks} = {info.num_kv_tokens} tokens"


def curl_line(model_name: str, url: str, needs_key: bool) -> str:
    """A command to paste. The key stands there by the name of a variable."""
    body = {"model": model_name, "prompt": "Once upon a time", "max_tokens": 32, "stream": True}
    quoted = json.dumps(body).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if needs_key else ""
    if url.startswith("unix:"):
        url = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost"
    return (
        f"curl -N {url}/v1/completions -H 'Content-Type: application/json'{key} \\\n  -d '{quoted}'"
    )


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 10**9 else f"{number / 1e6:.0f} million"
