"""How much may wait before the engine: requests, and the tokens of their prompts.

Counted in the front end, at the door, so that a refusal comes before anything of its request exists. A request
waits from its admission to its first step. Whoever finds a seat free, and nobody waiting, does not count: a burst
that the engine takes at once is no queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from ..api import EngineInfo, SamplingParams
from ..config.engine_config import SchedulerConfig
from ..config.options import flag_of
from ..errors import InvalidRequestError, OverloadedError
from .output import RequestState

MAX_RETRY_S = 60.0


class Wanted(NamedTuple):
    """What a request takes of the queue, or of the seats."""

    num_seqs: int
    num_tokens: int  # of its prompt; 0 where that is not known yet

    @classmethod
    def of(cls, sampling: SamplingParams, num_tokens: int = 0) -> Self:
        return cls(sampling.num_sequences, num_tokens)


class QueueBounds:
    """The limits of ``config``, where there are any."""

    def __init__(self, config: SchedulerConfig) -> None:
        limits = {
            "max_num_queued_reqs": config.max_num_queued_reqs,
            "max_num_queued_tokens": config.max_num_queued_tokens,
        }
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def is_set(self) -> bool:
        return bool(self._limits)

    def check(
        self,
        live: Iterable[RequestState],
        new: Sequence[Wanted],
        num_seats: int,
        info: EngineInfo,
    ) -> None:
        """Return if ``new`` may join the ``live`` requests, all of them.

        Args:
            num_seats: Sequences that can run; 0 where somebody waits, behind whom nobody gets a seat.

        Raises:
            OverloadedError: too much waits; ``reason`` names the limit.
            InvalidRequestError: too much of one call would have to wait if there were nothing else.
        """
        waiting, oldest = [], None
        for state in live:
            wanted = Wanted.of(state.admitted.new.sampling, len(state.prompt_token_ids))
            if state.metrics.scheduled_time is None:
                waiting.append(wanted)
                oldest = oldest or state.metrics.arrival_time
            else:
                num_seats -= wanted.num_seqs
        if not _queued(new, num_seats - sum(one.num_seqs for one in waiting)):
            return
        queued = _queued([*waiting, *new], num_seats)
        for name, limit in self._limits.items():
            if _measure(name, queued) > limit:
                self._refuse(name, limit, new, info, oldest)

    def _refuse(
        self, name: str, limit: int, new: Sequence[Wanted], info: EngineInfo, oldest: float | None
    ) -> None:
        things = "requests" if name == "max_num_queued_reqs" else "prompt tokens"
        if (alone := _measure(name, _queued(new, info.max_num_seqs))) > limit:
            raise InvalidRequestError(
                f"Of this call {alone} {things} would have to wait even at an idle server, which lets {limit} "
                f"wait ({flag_of(name)}). Send it in parts."
            )
        waited_s = 0.0 if oldest is None else time.monotonic() - oldest
        raise OverloadedError(
            f"The server has all that it can do: no more than {limit} {things} may wait ({flag_of(name)}). "
            "Try again later.",
            reason=name,
            retry_after_s=min(MAX_RETRY_S, waited_s),
        )


def _queued(requests: Sequence[Wanted], num_seats: int) -> Sequence[Wanted]:
    """Those that no seat is left for. None overtakes another."""
    for index, one in enumerate(requests):
        num_seats -= one.num_seqs
        if num_seats < 0:
            return requests[index:]
    return ()


def _measure(name: str, queued: Sequence[Wanted]) -> int:
    return len(queued) if name == "max_num_queued_reqs" else sum(one.num_tokens for one in queued)
