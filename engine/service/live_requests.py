"""The front end's live requests: which wait, which the engine has, and what comes back for each.

Owns them from their admission to their end, through the deaths of engines. Must not start or end any, nor know HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ..api import EngineInfo, FinishReason
from ..config.engine_config import SchedulerConfig
from ..errors import EngineDeadError, InvalidRequestError, OverloadedError
from ..text.tokenizer import Tokenizer
from .admission import Admitted
from .engine_lives import RESTARTING, EngineLives
from .engine_stream import EngineStream
from .frames import Abort, Add, Step, to_wire
from .output import RequestState
from .queue_bounds import QueueBounds, Wanted
from .stats_relay import StatsRelay
from .supervisor import Supervisor
from .vital_signs import Signs

logger = logging.getLogger(__name__)

MAX_NEW_WHILE_AWAY = 1024
"""Requests that may come and wait while there is no engine, on top of those that lived when it died."""


class LiveRequests:
    """Those that have been admitted and have not ended.

    Args:
        lives: the engine that is given them.
        supervisor: says which of them it is given after a death.
        config: has the bounds of the queue.
        relay: is told of their tokens and ends.
    """

    def __init__(
        self,
        lives: EngineLives,
        supervisor: Supervisor,
        config: SchedulerConfig,
        relay: StatsRelay,
    ) -> None:
        self._lives = lives
        self._supervisor = supervisor
        self._bounds = QueueBounds(config)
        self._relay = relay
        self.streams: dict[str, EngineStream] = {}
        self.handed: dict[str, EngineStream] = {}  # those that the engine has, by its own ids
        self._max_streams = 0  # while requests wait for an engine

    # --- from the caller to the engine -----------------------------------------------------------

    def check_queue(self, wanted: Sequence[Wanted], info: EngineInfo) -> None:
        """Refuse what would wait behind too much. First before, then after it is tokenised."""
        if self._bounds.is_set:
            live = [stream.state for stream in self.streams.values()]
            is_full = self._relay.last is not None and self._relay.last.num_waiting > 0
            self._bounds.check(live, wanted, 0 if is_full else info.max_num_seqs, info)

    def add(self, admitted: Sequence[Admitted], tokenizer: Tokenizer) -> list[EngineStream]:
        """Take requests in, all or none, and give them to the engine if it may have them.

        Raises:
            InvalidRequestError: one of the ids is taken.
            OverloadedError: there is no engine, and too many wait for it.
        """
        ids = [one.new.request_id for one in admitted]
        if len(self.streams.keys() | set(ids)) < len(self.streams) + len(ids):
            raise InvalidRequestError("A request with this id is running.", param="request_id")
        has_to_wait = not self._lives.is_up or self._supervisor.is_isolating
        if has_to_wait and len(self.streams) + len(ids) > self._max_streams:
            raise OverloadedError(
                f"{RESTARTING} Too many requests wait for it.",
                reason="engine_restarting",
                retry_after_s=2.0,
            )
        streams = [EngineStream(RequestState(one, tokenizer), self.abort) for one in admitted]
        self.streams.update(zip(ids, streams, strict=True))
        if not has_to_wait:
            self._hand_over(streams)
        return streams

    def feed(self) -> None:
        """Give the engine of those that wait what it may have."""
        if not self._lives.is_up:
            return
        waiting = {i: stream for i, stream in self.streams.items() if stream.engine_id is None}
        is_anyone_running = bool(self.handed)
        chosen = self._supervisor.choose(waiting.keys(), is_anyone_running=is_anyone_running)
        self._hand_over([waiting[request_id] for request_id in chosen])

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids have finished and are passed over."""
        stream = self.streams.pop(request_id, None)
        if stream is None:
            return
        stream.put(stream.state.abort().outputs, None)
        stream.wake()
        self._relay.record_finished(stream.state)
        self._take_back(stream)
        if self._supervisor.is_watchful:
            self._supervisor.forget(request_id)
            self.feed()

    def _hand_over(self, streams: Iterable[EngineStream]) -> None:
        """Give these to the engine, from where they are."""
        new = []
        for stream in streams:
            new.append(to_wire(stream.hand(stream.state.resume())))
            self.handed[new[-1].request_id] = stream
        if new:
            self._lives.send(Add(tuple(new)))

    def _take_back(self, stream: EngineStream) -> None:
        """The engine shall forget a request."""
        if stream.engine_id is not None:
            del self.handed[stream.engine_id]
            self._lives.send(Abort((stream.engine_id,)))
            stream.engine_id = None

    # --- from the engine to the caller -----------------------------------------------------------

    def deliver(self, step: Step) -> None:
        """Give everyone what a step has brought."""
        now = time.monotonic()
        handed, sink = self.handed, self._relay.sink
        gained: list[str] = []
        stopped: list[tuple[str, int]] = []
        ready: dict[Callable[[], None], None] = {}  # in order, each once
        for update in step.updates:
            stream = handed.get(update.request_id)
            if stream is None:
                continue
            state = stream.state
            outputs, error, stopped_here = state.advance(update, now, sink)
            if stopped_here:
                stopped += [(update.request_id, child_index) for child_index in stopped_here]
            if state.is_finished:
                del handed[update.request_id], self.streams[stream.request_id]
                self._relay.record_finished(state)
            if state.is_finished or (update.token_ids and state.has_gained()):
                gained.append(stream.request_id)
            if outputs:
                stream.put(outputs, error)
                ready[stream.callback or stream.wake] = None
        if stopped:
            self._lives.send(Abort(sequences=tuple(stopped)))
        if gained:
            self._note_gain(gained)
        for tell in ready:
            tell()

    def _note_gain(self, request_ids: list[str]) -> None:
        """Tell the supervisor, and let the next one run where they run one at a time."""
        supervisor = self._supervisor
        if not supervisor.is_watchful:
            supervisor.gained()
            return
        was_isolating = supervisor.is_isolating
        passed = self.streams.get(supervisor.gained(request_ids) or "")
        if passed is not None:
            self._take_back(passed)
        if was_isolating:
            self.feed()

    # --- when an engine has died -----------------------------------------------------------------

    def dying(self, signs: Signs) -> list[str]:
        """Requests of the step in which the engine died, or all that it had if it was between two."""
        if signs.dying_ids is not None:
            found = (self.handed.get(engine_id) for engine_id in signs.dying_ids)
            return [stream.request_id for stream in found if stream is not None]
        return [one.request_id for one in self.handed.values()] if signs.is_busy else []

    def take_all_back(self) -> None:
        """The engine that had them has died."""
        for stream in self.handed.values():
            stream.engine_id = None
        self.handed = {}

    def bound_waiting(self) -> None:
        """All of them wait for the next engine, and only so many more may."""
        self._max_streams = len(self.streams) + MAX_NEW_WHILE_AWAY

    def convict(self, request_id: str) -> None:
        """Answer the request that kills engines with an error."""
        stream = self.streams.pop(request_id)
        logger.error("request %s ends the engine process, and is given up", request_id)
        outputs = stream.state.abort(FinishReason.ERROR).outputs
        stream.put(outputs, "The engine process ended whenever it computed this request.")
        stream.wake()
        self._relay.record_finished(stream.state)

    def fail(self, reason: EngineDeadError) -> None:
        """No engine will compute them."""
        streams, self.streams, self.handed = list(self.streams.values()), {}, {}
        for stream in streams:
            stream.fail(reason)
