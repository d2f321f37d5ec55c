"""Beam search over one prompt: which beams go on, which hypotheses are finished, when it ends.

The rules are those of transformers' ``num_beams`` (``GenerationMixin._beam_search``), so that equal
logits give equal answers: of all continuations the best ``max(2, 1 + number of stop ids) * width`` are
looked at (of one beam, ``width`` plus the number of stop ids of them decide); those that end do so only from among the best ``width`` of them; the best ``width`` that do not
end are the next beams. A hypothesis scores its cumulative log-probability divided by its length to the
power of ``length_penalty``, and the best ``width`` are kept.

Knows scores and token ids; blocks and rows are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..api import SamplingParams
from ..step import SampleLogprobs

Candidates = Sequence[tuple[int, float]]
"""Token ids and log-probabilities, most likely first."""


class Continuation(NamedTuple):
    """A beam of the next step."""

    parent: int  # index of the beam it continues
    token_id: int
    score: float  # cumulative log-probability
    logprobs: SampleLogprobs | None = None  # of the token, where they are wanted


class Hypothesis(NamedTuple):
    """A finished continuation of the prompt."""

    score: float  # with the length penalty
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: tuple[SampleLogprobs, ...] | None = None  # one per token, where they are wanted


class BeamSearch:
    """State of one search.

    Args:
        sampling: width (``best_of`` or ``n``), ``length_penalty``, ``early_stopping``.
        stop_token_ids: end a hypothesis, of which they are part.
        max_tokens: longest hypothesis.
    """

    def __init__(
        self, sampling: SamplingParams, stop_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        self.width = sampling.num_sequences
        self.num_candidates = self.width + max(1, len(stop_token_ids))
        """Most likely tokens of each beam: ``width`` of them do not end it."""
        self._num_kept = max(2, 1 + len(stop_token_ids)) * self.width
        self.is_done = False
        self.candidates: dict[int, Candidates] = {}
        """By ``seq_id``: what the executor found for a beam, until all beams have theirs."""
        self.reported: dict[int, Sequence[SampleLogprobs]] = {}
        """Likewise what is reported of each candidate, where that is wanted."""
        self._scores = [0.0]  # of the live beams
        self._told: list[tuple[SampleLogprobs, ...]] = [()]  # of their tokens, where wanted
        self._finished: list[Hypothesis] = []  # best first
        self._n = sampling.n
        self._length_penalty = sampling.length_penalty
        self._early_stopping = sampling.early_stopping
        self._stop_token_ids = stop_token_ids
        self._max_tokens = max_tokens

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The ``n`` best finished ones, best first."""
        return self._finished[: self._n]

    def forget_candidates(self) -> None:
        """What is known of some live beams will be computed again."""
        self.candidates.clear()
        self.reported.clear()

    def advance(
        self,
        beams: Sequence[tuple[Sequence[int], Candidates]],
        reported: Sequence[Sequence[SampleLogprobs]] = (),
    ) -> list[Continuation]:
        """Take in the candidates of every live beam.

        Args:
            beams: per live beam, in the order of the last call's result: its output so far, all of one
                length, and its candidates.
            reported: per live beam what is reported of each of its candidates; empty if nothing is.

        Returns:
            The next beams, best first; none if the search ``is_done``.
        """
        length = len(beams[0][0]) + 1
        best = self._best_continuations([candidates for _, candidates in beams], reported)
        is_last = length >= self._max_tokens
        ended = [is_last or c.token_id in self._stop_token_ids for c in best]
        following = [c for c, is_end in zip(best, ended, strict=True) if not is_end][: self.width]
        top = list(zip(best, ended, strict=True))[: self.width]
        self._finish([c for c, is_end in top if is_end], [output for output, _ in beams], length)
        self._scores = [c.score for c in following]
        self._told = [self._told_of(c) for c in following]
        self.is_done = not following or not self._can_improve(length)
        return [] if self.is_done else following

    def _best_continuations(
        self, candidates: Sequence[Candidates], reported: Sequence[Sequence[SampleLogprobs]]
    ) -> list[Continuation]:
        everything = [
            Continuation(
                parent,
                token_id,
                self._scores[parent] + logprob,
                reported[parent][i] if reported else None,
            )
            for parent, own in enumerate(candidates)
            for i, (token_id, logprob) in enumerate(own)
        ]
        everything.sort(key=lambda c: -c.score)
        return everything[: self._num_kept]

    def _told_of(self, c: Continuation) -> tuple[SampleLogprobs, ...]:
        return self._told[c.parent] if c.logprobs is None else (*self._told[c.parent], c.logprobs)

    def _finish(
        self, ended: list[Continuation], outputs: Sequence[Sequence[int]], length: int
    ) -> None:
        if self._early_stopping is True and len(self._finished) == self.width:
            return
        for c in ended:
            score = c.score / length**self._length_penalty
            token_ids = (*outputs[c.parent], c.token_id)
            told = None if c.logprobs is None else self._told_of(c)
            self._finished.append(Hypothesis(score, token_ids, c.score, told))
        self._finished.sort(key=lambda h: -h.score)
        del self._finished[self.width :]

    def _can_improve(self, length: int) -> bool:
        """Whether a live beam may still become one of the ``width`` best hypotheses."""
        if len(self._finished) < self.width:
            return True
        if self._early_stopping is True:
            return False
        is_longest = self._early_stopping == "never" and self._length_penalty > 0.0
        reached = self._max_tokens if is_longest else length
        best_score: float = self._scores[0] / reached**self._length_penalty
        return best_score > self._finished[-1].score
