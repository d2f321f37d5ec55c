"""Embeddings: from the last hidden states of a prompt's tokens to one vector.

The mean is a sum in float64, token by token in their order, so that it has the same bits however the prompt
is cut into chunks. Knows hidden states, no plan and no rows of the table.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..api import PoolingParams
from ..step import RowResult
from .errors import ExecutionError

MAX_STATES_AT_ONCE = 256
"""So many leave the device and become float32 at a time."""
NONFINITE = "the model's hidden states are not finite"


class Pool:
    """What is kept of one sequence's hidden states until its prompt is computed."""

    def __init__(self, seq_id: int, params: PoolingParams, num_prompt_tokens: int) -> None:
        if params.pooling_type not in ("last", "mean"):
            raise ExecutionError(f"sequence {seq_id} is pooled by {params.pooling_type!r}")
        self._seq_id = seq_id
        self._params = params
        self._is_mean = params.pooling_type == "mean"
        self._num_prompt_tokens = num_prompt_tokens
        self._num_added = 0
        self._total: NDArray[np.float64] | None = None  # [hidden_size]

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is wanted."""
        return self._num_added == (self._num_prompt_tokens if self._is_mean else 1)

    def wanted(self, start: int, num_tokens: int) -> range:
        """Which of the positions from ``start`` on are to be added; a row's last ones.

        Raises:
            ExecutionError: a token before them was never added, or all were.
        """
        end = start + num_tokens
        if self.is_complete or (self._is_mean and start != self._num_added):
            raise ExecutionError(
                f"sequence {self._seq_id} is pooled from token {start} on, of {self._num_added} known"
            )
        return range(start if self._is_mean else max(start, self._num_prompt_tokens - 1), end)

    def add(self, hidden: Tensor) -> None:
        """Take in the hidden states ``[num_wanted, hidden_size]`` of a row's wanted positions."""
        for begin in range(0, len(hidden), MAX_STATES_AT_ONCE):
            chunk = hidden[begin : begin + MAX_STATES_AT_ONCE].to("cpu", torch.float32)
            self._add(chunk.numpy())
        self._num_added += len(hidden)

    def _add(self, states: NDArray[np.float32]) -> None:
        if self._total is None:
            self._total = np.zeros(states.shape[1])
        with np.errstate(invalid="ignore"):  # what is not finite is told at the end
            for state in states:
                self._total += state

    def result(self) -> RowResult:
        """The embedding, or that it is not finite.

        Raises:
            ExecutionError: the prompt is not computed.
        """
        if self._total is None or not self.is_complete:
            raise ExecutionError(f"sequence {self._seq_id} has no embedding before its last token")
        if not np.isfinite(self._total).all():
            return RowResult(self._seq_id, (), error=NONFINITE)
        vector = (self._total / self._num_added)[: self._params.dimensions]
        if self._params.normalize:
            vector = _normalized(vector)
        return RowResult(self._seq_id, (), embedding=vector.astype("<f4").tobytes())


def _normalized(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """At length 1; a vector of zeros has no direction and stays."""
    length = np.sqrt(np.square(vector).sum())
    return vector / length if length else vector
