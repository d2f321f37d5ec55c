"""What an engine process shows of itself while it lives, and leaves behind when it dies.

A page of memory that both processes map: the engine writes, the front end reads. Costs no message and no
system call, and survives ``kill -9``. A thread of the engine beats; the loop notes its turns, and before it
executes a step, whose requests are in it.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec

BEAT_S = 0.5
SIZE = 1 << 20  # the memory behind it is taken as it is used
_BEAT = struct.Struct("<Q")
_LOOP = struct.Struct("<QBBI")  # turns, is busy, is executing, bytes of the requests' ids
_LOOP_AT = _BEAT.size
_IDS_AT = _LOOP_AT + _LOOP.size


class Signs(NamedTuple):
    """One look at the page."""

    beat: int  # of the thread; the process runs while it goes up
    turn: int  # of the loop
    is_busy: bool  # the loop has something to do
    dying_ids: (
        tuple[str, ...] | None
    )  # requests of the step in execution; None: none is, or not known


def make_page() -> int:
    """A new page, all zeros. Returns its file descriptor; the memory has no name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("octavo-engine")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, SIZE)
    return fd


class SignsWriter:
    """The engine's side."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SIZE)
        os.close(fd)
        self._turn = 0
        self._num_bytes = 0

    def start_beating(self) -> None:
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            _BEAT.pack_into(self._page, 0, number)
            time.sleep(BEAT_S)

    def idle(self) -> None:
        """The loop has nothing to do."""
        self._write(is_busy=False, is_executing=False)

    def busy(self) -> None:
        """The loop does one thing or another, but executes no step."""
        self._turn += 1
        self._write(is_busy=True, is_executing=False)

    def name_requests(self, request_ids: Iterable[str]) -> None:
        """Whose sequences the steps have from now on."""
        ids = msgspec.msgpack.encode(list(request_ids))
        fits = len(ids) <= SIZE - _IDS_AT
        self._num_bytes = len(ids) if fits else 0
        if fits:
            self._page[_IDS_AT : _IDS_AT + len(ids)] = ids

    def executing(self) -> None:
        """A step is executed from here to the next :meth:`busy`."""
        self._write(is_busy=True, is_executing=True)

    def _write(self, *, is_busy: bool, is_executing: bool) -> None:
        _LOOP.pack_into(self._page, _LOOP_AT, self._turn, is_busy, is_executing, self._num_bytes)


class SignsReader:
    """The front end's side."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SIZE)

    def look(self) -> Signs:
        (beat,) = _BEAT.unpack_from(self._page, 0)
        turn, is_busy, is_executing, num_bytes = _LOOP.unpack_from(self._page, _LOOP_AT)
        ids = None
        if is_executing and num_bytes:
            with suppress(msgspec.DecodeError):  # it died in the middle of writing
                ids = msgspec.msgpack.decode(
                    self._page[_IDS_AT : _IDS_AT + num_bytes], type=tuple[str, ...]
                )
        return Signs(beat, turn, bool(is_busy), ids)

    def glance(self) -> tuple[int, int, bool]:
        """:meth:`look` at a living engine, whose requests' ids may change meanwhile: all but these."""
        (beat,) = _BEAT.unpack_from(self._page, 0)
        turn, is_busy, _, _ = _LOOP.unpack_from(self._page, _LOOP_AT)
        return beat, turn, bool(is_busy)

    def close(self) -> None:
        """Give the page back: it holds a file descriptor."""
        self._page.close()


class Watch:
    """Tells a stuck engine from one that takes its time.

    Counts in its own looks, not by the clock: after a pause of the whole machine both sides are late. An engine
    is stuck when its thread has not beaten for ``heartbeat_timeout_s``, or when the loop has been at one thing for
    ``step_timeout_s``. While the engine loads there are beats and no turns.

    Args:
        interval_s: between two looks.
    """

    def __init__(
        self, heartbeat_timeout_s: float, step_timeout_s: float, interval_s: float
    ) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._step_timeout_s = step_timeout_s
        self._interval_s = interval_s
        self._beat = self._turn = 0
        self._silent_s = self._same_turn_s = 0.0

    def look(self, beat: int, turn: int, is_busy: bool) -> str | None:
        """Take in what is seen now. Returns why the engine counts as stuck, if it does."""
        self._silent_s = 0.0 if beat != self._beat else self._silent_s + self._interval_s
        is_same_turn = is_busy and turn == self._turn
        self._same_turn_s = self._same_turn_s + self._interval_s if is_same_turn else 0.0
        self._beat, self._turn = beat, turn
        if self._silent_s >= self._heartbeat_timeout_s:
            return f"gave no sign of life for {self._silent_s:.0f} s"
        if self._same_turn_s >= self._step_timeout_s:
            return f"has been in one step for {self._same_turn_s:.0f} s"
        return None
