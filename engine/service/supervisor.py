"""What becomes of the service when an engine process has died: start another, with whom, or give up.

Counts deaths, and finds the request that kills engines by letting suspects run one at a time. Pure: knows
neither processes nor time nor sockets; whoever runs the engine tells it what happened and does what it says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

FIRST_DELAY_S = 0.25
MAX_DELAY_S = 30.0
SUSPECT_DEATHS = 3
"""Dying steps in a row that a request was part of, gaining nothing, while others went on."""


class Verdict(NamedTuple):
    """What to do after a death."""

    is_over: bool  # too many in vain: start no other engine
    delay_s: float  # before the next start
    convicted: str | None = (
        None  # the request that was alone at this death, to be answered with an error
    )


class Supervisor:
    """The policy of restarts.

    A death is in vain if nobody has gained a token since the one before. After the second of these the
    requests of the dying step are suspects, and so is a request that has gained nothing through
    ``SUSPECT_DEATHS`` dying steps of its own. While there are suspects, one of them runs at a time and nobody
    else; a token of its own clears it. One that was alone at a death, on trial or for the second time
    without a token between, is convicted.

    Args:
        max_restarts: deaths in vain, in a row, after which an engine is started again.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_in_vain = 0
        self._has_gained = False  # anyone, in this engine's life
        self._num_deaths: dict[str, int] = {}  # of requests in dying steps, since their last token
        self._alone: set[str] = set()  # those that were alone in such a step
        self._suspects: dict[str, None] = {}  # in order
        self._on_trial: str | None = None

    @property
    def is_watchful(self) -> bool:
        """Whether it matters which requests gain tokens."""
        return bool(self._num_deaths)

    @property
    def is_isolating(self) -> bool:
        """Whether requests run one at a time."""
        return bool(self._suspects)

    def gained(self, request_ids: Iterable[str] = ()) -> str | None:
        """Tokens have come, that no earlier engine had given; of these requests, while watchful.

        Returns:
            The request that has just passed its trial and has to make way for the next suspect.
        """
        self._has_gained = True
        passed = None
        for request_id in request_ids:
            if request_id == self._on_trial:
                passed = request_id
            self.forget(request_id)
        return passed if self._suspects else None

    def forget(self, request_id: str) -> None:
        """A request has ended, or is cleared."""
        self._num_deaths.pop(request_id, None)
        self._alone.discard(request_id)
        self._suspects.pop(request_id, None)
        if request_id == self._on_trial:
            self._on_trial = None

    def choose(self, waiting: Collection[str], *, is_anyone_running: bool) -> Collection[str]:
        """Which of the waiting requests the engine is given now."""
        if not self._suspects:
            return waiting
        if is_anyone_running:
            return ()
        self._on_trial = next((one for one in self._suspects if one in waiting), None)
        return () if self._on_trial is None else (self._on_trial,)

    def died(self, dying: Collection[str], *, was_sound: bool = False) -> Verdict:
        """An engine has died.

        Args:
            dying: the requests of its last step; none if it died between steps with nothing to do.
            was_sound: it had long been ready, and had nothing to do.
        """
        is_series = not (self._has_gained or was_sound)
        self._num_in_vain = self._num_in_vain + 1 if is_series else 1
        self._has_gained = False
        convicted = self._judge(dying)
        for request_id in dying:
            if request_id != convicted:
                self._note_death(request_id, is_alone=len(dying) == 1)
        self._on_trial = None
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self._num_in_vain - 1, 32))
        return Verdict(self._num_in_vain > self._max_restarts, delay_s, convicted)

    def _judge(self, dying: Collection[str]) -> str | None:
        if len(dying) != 1:
            return None
        (request_id,) = dying
        if request_id != self._on_trial and request_id not in self._alone:
            return None
        self.forget(request_id)
        return request_id

    def _note_death(self, request_id: str, *, is_alone: bool) -> None:
        self._num_deaths[request_id] = self._num_deaths.get(request_id, 0) + 1
        if is_alone:
            self._alone.add(request_id)
        if self._num_in_vain >= 2 or self._num_deaths[request_id] >= SUSPECT_DEATHS:
            self._suspects[request_id] = None
