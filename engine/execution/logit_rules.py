"""What a row's sampling parameters ask of its logits before a token is drawn.

Penalties, then logit bias, then the masks: allowed ids, bad words, and end and stop ids until ``min_tokens``. State
is kept per row and only for rows that need it, and grows by what each step adds: nothing here touches
the whole vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..api import SamplingParams
from .transfer import to_device


class TokenCounts:
    """The distinct tokens of a sequence, and how often each came in the output."""

    def __init__(self, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]) -> None:
        ids = np.unique(np.concatenate((prompt_ids, output_ids)))
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self._ids = ids.astype(np.int64)
        self._counts = np.zeros(len(ids), dtype=np.float32)
        self._num_ids = len(ids)
        for token_id in output_ids.tolist():
            self.add(token_id)

    @property
    def ids(self) -> NDArray[np.int64]:
        """``[num_ids]``, distinct tokens of prompt and output."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> NDArray[np.float32]:
        """``[num_ids]``, occurrences of each in the output."""
        return self._counts[: self._num_ids]

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._num_ids
            if place == len(self._ids):
                room = max(16, place)
                self._ids = np.concatenate((self._ids, np.zeros(room, dtype=np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.float32)))
            self._ids[place] = token_id
            self._num_ids += 1
        self._counts[place] += 1.0


class LogitRules:
    """One row's rules."""

    def __init__(
        self,
        sampling: SamplingParams,
        end_ids: frozenset[int],
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
    ) -> None:
        self.sampling = sampling
        self.token_counts = TokenCounts(prompt_ids, output_ids) if sampling.has_penalties else None
        bias = sampling.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self.bias_values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self.masked_ids = np.array(sorted(end_ids), dtype=np.int64)
        self.allowed_ids: NDArray[np.int64] | None = None
        if sampling.allowed_token_ids is not None:
            self.allowed_ids = np.unique(np.array(sampling.allowed_token_ids, dtype=np.int64))
        num_before = max(map(len, sampling.bad_word_ids), default=1) - 1
        self._recent: deque[int] = deque(
            output_ids[len(output_ids) - num_before :].tolist() if num_before else (), num_before
        )

    def append(self, token_id: int) -> None:
        """Take note of one more output token."""
        if self.token_counts is not None:
            self.token_counts.add(token_id)
        self._recent.append(token_id)

    def bad_ids(self) -> NDArray[np.int64]:
        """``[num_ids]``, tokens that would complete a bad word in the output."""
        recent = tuple(self._recent)
        found = [
            last
            for *before, last in self.sampling.bad_word_ids
            if not before or recent[-len(before) :] == tuple(before)
        ]
        return np.array(found, dtype=np.int64)


def needs_rules(sampling: SamplingParams) -> bool:
    """Whether a row's logits are changed before temperature and filters."""
    return bool(
        sampling.has_penalties or sampling.logit_bias or sampling.min_tokens or sampling.has_masks
    )


class RuledRow(NamedTuple):
    """A row of the logits that has rules."""

    row: int
    rules: LogitRules
    num_outputs: int  # tokens produced so far


def apply_rules(logits: Tensor, ruled: Sequence[RuledRow]) -> None:
    """Change ``logits [num_rows, vocab_size]`` float32 in place."""
    _penalise(logits, [r for r in ruled if r.rules.token_counts is not None])
    biased = [r for r in ruled if len(r.rules.bias_ids)]
    if biased:
        place = _places([(r.row, r.rules.bias_ids) for r in biased], logits.device)
        values = np.concatenate([r.rules.bias_values for r in biased])
        logits[place] += to_device(values, logits.device)
    for r in ruled:
        if r.rules.allowed_ids is not None:
            _keep_only(logits[r.row], to_device(r.rules.allowed_ids, logits.device))
    bad = [(r.row, r.rules.bad_ids()) for r in ruled if r.rules.sampling.bad_word_ids]
    if bad:
        logits[_places(bad, logits.device)] = -torch.inf
    masked = [r for r in ruled if r.num_outputs < r.rules.sampling.min_tokens]
    if masked:
        logits[_places([(r.row, r.rules.masked_ids) for r in masked], logits.device)] = -torch.inf


def _keep_only(row: Tensor, ids: Tensor) -> None:
    """Leave ``ids [num_ids]`` of ``row [vocab_size]`` and mask the others, in place."""
    kept = row[ids]
    row.fill_(-torch.inf)
    row[ids] = kept


def _penalise(logits: Tensor, ruled: Sequence[RuledRow]) -> None:
    """Repetition (Keskar et al., CTRL, 2019), then frequency and presence as OpenAI defines them."""
    counts = [r.rules.token_counts for r in ruled if r.rules.token_counts is not None]
    if not counts:
        return
    place = _places([(r.row, c.ids) for r, c in zip(ruled, counts, strict=True)], logits.device)
    strengths = np.repeat(
        np.array(
            [
                (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
                for s in (r.rules.sampling for r in ruled)
            ],
            dtype=np.float32,
        ),
        [len(c.ids) for c in counts],
        axis=0,
    )
    repetition, frequency, presence = to_device(strengths.T.copy(), logits.device)
    num_seen = to_device(np.concatenate([c.counts for c in counts]), logits.device)
    values = logits[place]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[place] = values - frequency * num_seen - presence * (num_seen > 0)


def _places(
    rows: Sequence[tuple[int, NDArray[np.int64]]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Indices of tokens in the logits: (row of each, id of each)."""
    lengths = [len(ids) for _, ids in rows]
    row_of = np.repeat(np.array([row for row, _ in rows], dtype=np.int64), lengths)
    ids = np.concatenate([ids for _, ids in rows])
    return to_device(row_of, device), to_device(ids, device)
