"""Which sequences come back where ``best_of`` asks for more of them than ``n``.

Owns the outputs of a request until its last sequence has ended. Must not know how text is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..api import CompletionOutput, SamplingParams
from ..step import SampleLogprobs
from .deltas import append_delta


class BestOf:
    """Keeps what each sequence has given, and ranks them.

    The best has the highest log-probability per token, as in OpenAI's completions API; of equals the
    lowest index wins. A sequence without a token comes last.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._n = sampling.n
        self._kept = [
            CompletionOutput(index, "", [], cumulative_logprob=0.0)
            for index in range(sampling.num_sequences)
        ]

    def add(self, delta: CompletionOutput, logprobs: Sequence[SampleLogprobs]) -> None:
        """Append what a step gave one sequence; ``logprobs`` holds one entry per token of it."""
        kept = self._kept[delta.index]
        append_delta(kept, delta)
        total = math.fsum(sample.logprob for sample in logprobs)
        kept.cumulative_logprob = (kept.cumulative_logprob or 0.0) + total

    def select(self) -> tuple[list[CompletionOutput], int]:
        """The ``n`` best, numbered from the best on, and the number of tokens in the others."""
        ranked = sorted(self._kept, key=_mean_logprob, reverse=True)
        best, rest = ranked[: self._n], ranked[self._n :]
        for index, output in enumerate(best):
            output.index = index
        return best, sum(len(output.token_ids) for output in rest)


def _mean_logprob(output: CompletionOutput) -> float:
    num_tokens = len(output.token_ids)
    if not num_tokens or output.cumulative_logprob is None:
        return -math.inf
    return output.cumulative_logprob / num_tokens
