"""The engine process: its start, its loop, its end.

The front end starts it with a pipe as standard input: first comes the configuration, then nothing until
the front end dies or closes it, upon which this process ends at once. Requests and results travel over
a local socket (see ``frames``).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import msgspec
import setproctitle
import zmq

from ..api import EngineInfo
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from ..logs import set_up_logging
from ..step import StepPlan
from .core import EngineCore
from .frames import (
    Abort,
    Add,
    Answer,
    Failed,
    FromEngine,
    Hello,
    KVSnapshotRequest,
    Loading,
    ResetPrefixCache,
    Snapshot,
    Step,
    decode_to_engine,
    encode,
    from_wire,
)
from .vital_signs import SignsWriter

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
Send = Callable[[FromEngine], None]
BuildCore = Callable[[EngineConfig, int, Progress], tuple[EngineCore, EngineInfo]]

PR_SET_PDEATHSIG = 1  # of Linux's prctl
_LENGTH = struct.Struct("<I")


class Launch(msgspec.Struct, frozen=True):
    """What the front end writes to the engine's standard input."""

    config: EngineConfig
    endpoint: str
    epoch: int
    log_level: str
    signs_fd: int  # of the page of :mod:`.vital_signs`


def pack_launch(launch: Launch) -> bytes:
    body = msgspec.msgpack.encode(launch)
    return _LENGTH.pack(len(body)) + body


def run(build_core: BuildCore) -> int:
    """Serve until the front end closes our standard input. The whole life of an engine process.

    Returns:
        The exit status after a failure, 1. A regular end exits from the thread that watches the pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group;
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the front end decides when the engine ends
    setproctitle.setproctitle("octavo-engine")
    launch = _read_launch()
    signs = SignsWriter(launch.signs_fd)
    signs.start_beating()
    _end_with_parent()
    threading.Thread(target=_end_with_front_end, name="watch-front-end", daemon=True).start()
    set_up_logging(launch.log_level, launch.config.execution.log_format, "engine")
    with zmq.Context() as context:
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.linger = 1000
        socket.connect(launch.endpoint)
        try:
            return _serve(socket, launch, build_core, signs)
        finally:
            socket.close()


def _read_launch() -> Launch:
    (size,) = _LENGTH.unpack(_read_exactly(_LENGTH.size))
    return msgspec.msgpack.decode(_read_exactly(size), type=Launch)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise SystemExit("octavo-engine is started by octavo, not by hand")
        data += part
    return data


def _end_with_parent() -> None:
    """Have the kernel, where it can, kill this process with the front end, though it be stopped or hang.

    The kernel means the thread that started it, which is the event loop's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_front_end() -> None:
    """Wait for the end of standard input: the front end is gone."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _serve(
    socket: zmq.Socket[bytes], launch: Launch, build_core: BuildCore, signs: SignsWriter
) -> int:
    def send(frame: FromEngine) -> None:
        socket.send(encode(frame))

    try:
        core, info = build_core(
            launch.config, launch.epoch, lambda stage, fraction: send(Loading(stage, fraction))
        )
        gc.collect()
        gc.freeze()  # what the model and its libraries made stays; no collection has to visit it
        send(Hello(info))
        return _loop(socket, core, send, signs)
    except ConfigError as error:
        send(Failed(str(error), is_refusal=True))
        return 1
    except Exception as error:
        logger.exception("the engine ends")
        send(Failed(f"{type(error).__name__}: {error}"))
        return 1


def _loop(socket: zmq.Socket[bytes], core: EngineCore, send: Send, signs: SignsWriter) -> NoReturn:
    """Drain the inbox, compute a step, publish it; sleep on the socket while there is nothing to do."""
    _show_steps(core, signs)
    while True:
        is_idle = not core.has_work
        if is_idle:
            send(Snapshot(core.stats()))
            signs.idle()
            socket.poll()
        signs.busy()
        _drain(socket, core, send)
        if core.has_work:
            output = core.step()
            if output.updates or output.num_step_tokens:
                send(Step(*output))
            elif core.has_work:  # beams went on, of which nothing is told before their end
                send(Snapshot(output.stats))


def _show_steps(core: EngineCore, signs: SignsWriter) -> None:
    """Let the page say whose sequences a step has, while it is executed."""

    def before(plan: StepPlan) -> None:
        if plan.new_rows or plan.removed_seq_ids or plan.forks:
            signs.name_requests(core.running_request_ids)
        signs.executing()

    core.before_execution = before
    core.after_execution = signs.busy


def _drain(socket: zmq.Socket[bytes], core: EngineCore, send: Send) -> None:
    """Take in all that has come. Those who ask for the KV memory get one picture of it, taken last."""
    question_ids = []
    while socket.poll(0):
        question_id = _handle(core, socket.recv(), send)
        if question_id is not None:
            question_ids.append(question_id)
    if question_ids:
        snapshot = core.kv_snapshot()
        for question_id in question_ids:
            send(Answer(question_id, snapshot))


def _handle(core: EngineCore, data: bytes, send: Send) -> int | None:
    """Take in one frame. A damaged one is a broken invariant: its only writer is the front end.

    Returns:
        The id of a question about the KV memory, which is still to be answered.
    """
    frame = decode_to_engine(data)
    if isinstance(frame, Add):
        for request in frame.requests:
            core.add(from_wire(request))
    elif isinstance(frame, Abort):
        core.abort(frame.request_ids, frame.sequences)
    elif isinstance(frame, KVSnapshotRequest):
        return frame.question_id
    elif isinstance(frame, ResetPrefixCache):
        core.reset_prefix_cache()
        send(Answer(frame.question_id))
    return None
