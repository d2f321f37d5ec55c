"""The engine in this process: its core, and the requests that callers wait for.

Owns whose turn it is, and the results of steps until they are asked for. Must not know how scripts write
prompts and arguments.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..api import GenerationRequest, KVSnapshot, RequestOutput
from ..errors import ConfigError
from ..scheduling.request import SequenceUpdate
from ..stats import EngineStats
from ..text.tokenizer import Tokenizer
from .admission import Admission
from .core import EngineCore
from .offline_progress import progress_bar
from .output import RequestState, merge

if TYPE_CHECKING:
    from tqdm import tqdm


class OfflineEngine:
    """Steps the core in the thread of whoever waits; a step computes the requests of all threads.

    Args:
        core: computes.
        tokenizer: makes text of what it gives.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._live: dict[str, RequestState] = {}
        self._results: dict[str, RequestOutput] = {}
        self._is_closed = False
        self.turn = threading.RLock()  # of whoever touches the core or what is noted of requests

    def check_open(self) -> None:
        """
        Raises:
            ConfigError: the engine has been closed.
        """
        if self._is_closed:
            raise ConfigError("This LLM has been closed.")

    def close(self) -> None:
        """Give back the model's memory. May be called more than once."""
        with self.turn:
            self._is_closed = True
            vars(self).pop("_core", None)

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        with self.turn:
            self.check_open()
            return self._core.stats()

    def kv_snapshot(self) -> KVSnapshot:
        """Every block of the KV memory and every sequence in it."""
        with self.turn:
            self.check_open()
            return self._core.kv_snapshot()

    def reset_prefix_cache(self) -> None:
        """Let nobody find anything that was computed so far."""
        with self.turn:
            self.check_open()
            self._core.reset_prefix_cache()

    def submit(
        self, requests: Sequence[GenerationRequest], admission: Admission
    ) -> list[RequestState]:
        """Admit requests, all or none, and queue them."""
        with self.turn:
            self.check_open()
            states = [RequestState(admission.admit(one), self._tokenizer) for one in requests]
            for state in states:
                self._core.add(state.admitted.new)
                self._live[state.request_id] = state
        return states

    def run(
        self, states: Sequence[RequestState], use_tqdm: bool | Callable[..., tqdm[Any]]
    ) -> list[RequestOutput]:
        """Step until these requests are done; others that are queued advance beside them."""
        bar = progress_bar(len(states), use_tqdm)
        ids = [state.request_id for state in states]
        num_done = 0
        try:
            while (left := [i for i in ids if i in self._live]) and self._step():
                if bar is not None and len(ids) - len(left) > num_done:
                    bar.update(len(ids) - len(left) - num_done)
                    num_done = len(ids) - len(left)
            results = [self._results.pop(request_id) for request_id in ids]
            if bar is not None:
                bar.update(len(ids) - num_done)
        finally:
            self._forget(ids)
            if bar is not None:
                bar.close()
        for result in results:
            result.outputs.sort(key=lambda output: output.index)
        return results

    def _forget(self, request_ids: Sequence[str]) -> None:
        with self.turn:
            if not self._is_closed:
                self._core.abort(request_ids)
            for request_id in request_ids:
                self._live.pop(request_id, None)
                self._results.pop(request_id, None)

    def _step(self) -> bool:
        """Compute one step, and put what it gave to the results.

        Returns:
            Whether there was anything to compute.
        """
        with self.turn:
            self.check_open()
            if not self._core.has_work:
                return False
            with _interrupt_between_steps():
                self._note(self._core.step().updates)
            return True

    def _note(self, updates: Sequence[SequenceUpdate]) -> None:
        now = time.monotonic()
        for update in updates:
            state = self._live.get(update.request_id)
            if state is None:
                continue
            output, stopped_here = state.apply(update, now)
            if stopped_here:
                self._core.abort([], [(update.request_id, index) for index in stopped_here])
            earlier = self._results.setdefault(output.request_id, output)
            if earlier is not output:
                merge(earlier, output)
            if output.finished:
                del self._live[output.request_id]


@contextmanager
def _interrupt_between_steps() -> Iterator[None]:
    """Hold Ctrl-C back until a step is committed and noted, so that the engine and others' requests go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt
