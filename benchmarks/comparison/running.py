"""A started engine: asked over HTTP, or through the pipes of a worker process.

Only one engine may compute at a time, and an idle one may not take a core from it: threads that spin while they
wait, or poll for work. So every process of an idle engine is stopped (SIGSTOP) until its turn comes.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from serve import (
    CONCURRENCY,
    Work,
    check_lengths,
    free_port,
    memory_pss_bytes,
    run,
    summary,
    wait_first_token,
    workload,
)

from .engines import SERVED_NAME, Engine

START_TIMEOUT_S = 600.0
JOB_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
SETTLE_S = 0.3  # from waking an engine to asking it


class Running(ABC):
    """One engine's processes. Starts them; ``first_token_s`` is how long the first token took."""

    def __init__(self, engine: Engine, log_path: Path) -> None:
        self.engine = engine
        self.log_path = log_path
        self.first_token_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        begin = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = self._launch(log)
        self.first_token_s = self._wait_first_token(begin)

    @abstractmethod
    def _launch(self, log: Any) -> subprocess.Popen[bytes]: ...

    @abstractmethod
    def _wait_first_token(self, begin: float) -> float: ...

    @abstractmethod
    def ask(self, name: str, repeat: int, ids: list[int]) -> dict[str, Any]:
        """The figures of one workload, as ``serve.summary`` has them."""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.engine.label} was not started")
        return self._process

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **dict(self.engine.environment)}

    def pss_bytes(self) -> int:
        return memory_pss_bytes(self.process.pid)

    def pause(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def _signal_all(self, number: signal.Signals) -> None:
        for member in self.family():
            member.send_signal(number)

    def stop(self) -> None:
        """End every process; those that do not end by themselves are killed."""
        if self._process is None or self._process.poll() is not None:
            return
        family = self.family()
        self.resume()
        self._process.terminate()
        _, left = psutil.wait_procs(family, STOP_TIMEOUT_S)
        for member in left:
            member.kill()
        self._process.wait()


class HttpRunning(Running):
    def _launch(self, log: Any) -> subprocess.Popen[bytes]:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [word.replace("{port}", str(port)) for word in self.engine.command]
        return subprocess.Popen(command, stdout=log, stderr=log, env=self._environment())

    def _wait_first_token(self, begin: float) -> float:
        return wait_first_token(self.url, SERVED_NAME, self.process, begin)

    def ask(self, name: str, repeat: int, ids: list[int]) -> dict[str, Any]:
        return asyncio.run(run(self.url, SERVED_NAME, name, repeat, ids))


class WorkerRunning(Running):
    def _launch(self, log: Any) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        environment = self._environment()
        return subprocess.Popen(
            self.engine.command, stdin=pipe, stdout=pipe, stderr=log, env=environment
        )

    def _wait_first_token(self, begin: float) -> float:
        self._answer(START_TIMEOUT_S)
        return time.monotonic() - begin

    def ask(self, name: str, repeat: int, ids: list[int]) -> dict[str, Any]:
        works = workload(name, repeat, ids)
        if len(works) > CONCURRENCY[name]:
            raise ValueError(f"{name} sends requests one after another; a worker takes one batch")
        stream = self.process.stdin
        if stream is None:
            raise RuntimeError("the worker has no standard input")
        stream.write((json.dumps(works) + "\n").encode())
        stream.flush()
        return batch_summary(works, self._answer(JOB_TIMEOUT_S))

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stream = self.process.stdout
        if stream is None or not select.select([stream], [], [], timeout_s)[0]:
            raise RuntimeError(f"{self.engine.label} is silent; its log is {self.log_path}")
        if not (line := stream.readline()):
            raise RuntimeError(f"{self.engine.label} ended; its log is {self.log_path}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def batch_summary(works: list[Work], answer: dict[str, Any]) -> dict[str, Any]:
    """The figures of a worker's answer."""
    for work, request in zip(works, answer["requests"], strict=True):
        check_lengths(work, request["in"], request["out"])
        request["tpot"] = (request["last"] - request["ttft"]) / max(1, request["out"] - 1)
        request["itl"] = []
    return summary(answer["requests"], answer["seconds"])


@contextmanager
def running(engine: Engine, log_dir: Path) -> Iterator[Running]:
    """Start an engine; it has answered one request when this yields."""
    log_dir.mkdir(parents=True, exist_ok=True)
    kind = HttpRunning if engine.transport == "http" else WorkerRunning
    log_name = f"{engine.name}-{engine.precision}-{engine.transport}.log".replace(" ", "-")
    started = kind(engine, log_dir / log_name)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@contextmanager
def turn(engine: Running) -> Iterator[Running]:
    """Wake an engine for as long as it is asked."""
    engine.resume()
    try:
        time.sleep(SETTLE_S)
        yield engine
    finally:
        engine.pause()
