"""What the executor keeps per sequence between steps: tokens, block table, sampling state.

Numbers that every step reads for every row are columns of numpy arrays, so that a step's inputs are
built without a loop over tokens. Memory of rows and positions that never occur is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api import SamplingParams
from ..step import Fork, NewRow, ScheduledRow, StepPlan
from .errors import ExecutionError
from .logit_rules import LogitRules, needs_rules
from .pooling import Pool

_COLUMNS: dict[str, Any] = {
    "num_tokens": np.int64,
    "num_prompt_tokens": np.int64,
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "is_plain": np.bool_,  # takes the most likely token, by no rule, and reports nothing of it
}


_LEAST_TOP_P = 1e-6
"""Keeps the most likely token only, as any smaller value, and is not 0 in float32."""


class RowTable:
    """The live rows. An index into the columns is a sequence's place until it is removed."""

    def __init__(
        self,
        *,
        max_num_rows: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_groups: int = 1,
    ) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._places: dict[int, int] = {}
        self._free = list(range(max_num_rows))
        max_num_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((max_num_rows, max_model_len + 1), dtype=np.int32)
        shape = (num_groups, max_num_rows, max_num_blocks)
        self.block_tables = np.zeros(shape, dtype=np.int32)
        self.columns = {name: np.zeros(max_num_rows, dtype) for name, dtype in _COLUMNS.items()}
        self.sampling: dict[int, SamplingParams] = {}  # by place
        self.rules: dict[int, LogitRules] = {}  # by place, only where there are any
        self.pools: dict[int, Pool] = {}  # likewise

    def __len__(self) -> int:
        return len(self._places)

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows up to date with a plan: forks, removals, new rows, tables, tokens.

        Raises:
            ExecutionError: the plan names a sequence, block or token that cannot be.
        """
        for fork in plan.forks:
            self._fork(fork)
        for seq_id in plan.removed_seq_ids:
            self._remove(seq_id)
        for new in plan.new_rows:
            self._add(new)
        for row in plan.rows:
            self._update(row)

    def place_of(self, seq_id: int) -> int:
        """Index into the columns.

        Raises:
            ExecutionError: there is no such row.
        """
        place = self._places.get(seq_id)
        if place is None:
            raise ExecutionError(f"the executor does not know sequence {seq_id}")
        return place

    def append(self, place: int, token_ids: Sequence[int]) -> None:
        """Add output tokens to a row."""
        first = int(self.columns["num_tokens"][place])
        last = first + len(token_ids)
        if last > self.tokens.shape[1]:
            raise ExecutionError(f"a sequence grows to {last} tokens, beyond the model's window")
        self.tokens[place, first:last] = token_ids
        self.columns["num_tokens"][place] = last
        rules = self.rules.get(place)
        if rules is not None:
            for token_id in token_ids:
                rules.append(token_id)

    def append_each(self, places: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Add one output token ``[num_rows]`` to each of the rows, which are all different."""
        num_tokens = self.columns["num_tokens"]
        ends = num_tokens[places]
        if len(places) and ends.max() >= self.tokens.shape[1]:
            raise ExecutionError(
                f"a sequence grows to {ends.max() + 1} tokens, beyond the model's window"
            )
        self.tokens[places, ends] = token_ids
        num_tokens[places] = ends + 1
        if self.rules:
            for place, token_id in zip(places.tolist(), token_ids.tolist(), strict=True):
                if (rules := self.rules.get(place)) is not None:
                    rules.append(token_id)

    def num_outputs(self, place: int) -> int:
        """Tokens that a row has produced so far."""
        return int(self.columns["num_tokens"][place] - self.columns["num_prompt_tokens"][place])

    def _open(self, seq_id: int) -> int:
        if seq_id in self._places:
            raise ExecutionError(f"sequence {seq_id} is added twice")
        if not self._free:
            self._grow()
        place = self._places[seq_id] = self._free.pop()
        return place

    def _grow(self) -> None:
        size = len(self.tokens)
        self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
        more = np.zeros_like(self.block_tables)
        self.block_tables = np.concatenate((self.block_tables, more), axis=1)
        for name, column in self.columns.items():
            self.columns[name] = np.concatenate((column, np.zeros_like(column)))
        self._free = list(range(size, 2 * size))

    def _remove(self, seq_id: int) -> None:
        place = self.place_of(seq_id)
        del self._places[seq_id]
        del self.sampling[place]
        self.rules.pop(place, None)
        self.pools.pop(place, None)
        self._free.append(place)

    def _add(self, new: NewRow) -> None:
        num_prompt = len(new.prompt_token_ids)
        token_ids = np.fromiter((*new.prompt_token_ids, *new.output_token_ids), dtype=np.int64)
        if len(token_ids) > self.tokens.shape[1]:
            raise ExecutionError(
                f"sequence {new.seq_id} has {len(token_ids)} tokens, beyond the model's window"
            )
        self._check_tokens(new.seq_id, token_ids)
        place = self._open(new.seq_id)
        self.tokens[place, : len(token_ids)] = token_ids
        self._start(place, num_prompt, len(token_ids), new.sampling, new.seed)
        if new.pooling is not None:
            self.pools[place] = Pool(new.seq_id, new.pooling, num_prompt)

    def _fork(self, fork: Fork) -> None:
        parent = self.place_of(fork.parent_seq_id)
        num_prompt = int(self.columns["num_prompt_tokens"][parent])
        if not num_prompt <= fork.num_tokens <= self.columns["num_tokens"][parent]:
            raise ExecutionError(
                f"sequence {fork.child_seq_id} cannot start with {fork.num_tokens} tokens of "
                f"{fork.parent_seq_id}"
            )
        place = self._open(fork.child_seq_id)
        self.tokens[place, : fork.num_tokens] = self.tokens[parent, : fork.num_tokens]
        self.block_tables[:, place] = self.block_tables[:, parent]
        self._start(place, num_prompt, fork.num_tokens, self.sampling[parent], fork.seed)

    def _start(
        self, place: int, num_prompt: int, num_tokens: int, sampling: SamplingParams, seed: int
    ) -> None:
        columns = self.columns
        columns["num_prompt_tokens"][place] = num_prompt
        columns["num_tokens"][place] = num_tokens
        columns["temperature"][place] = 0.0 if sampling.is_greedy else sampling.temperature
        columns["top_k"][place] = min(sampling.top_k, self._vocab_size)
        columns["top_p"][place] = max(sampling.top_p, _LEAST_TOP_P)
        columns["min_p"][place] = sampling.min_p
        columns["seed"][place] = (seed + 2**63) % 2**64 - 2**63  # children of the largest wrap
        self.sampling[place] = sampling
        has_rules = needs_rules(sampling)
        reports = sampling.needs_logprobs
        columns["is_plain"][place] = not (columns["temperature"][place] or has_rules or reports)
        if has_rules:
            end_ids = self._eos_token_ids | frozenset(sampling.stop_token_ids)
            tokens = self.tokens[place]
            self.rules[place] = LogitRules(
                sampling,
                frozenset(i for i in end_ids if 0 <= i < self._vocab_size),
                tokens[:num_prompt],
                tokens[num_prompt:num_tokens],
            )

    def _update(self, row: ScheduledRow) -> None:
        place = self.place_of(row.seq_id)
        if row.appended_token_ids:
            token_ids = np.fromiter(row.appended_token_ids, dtype=np.int64)
            self._check_tokens(row.seq_id, token_ids)
            self.append(place, row.appended_token_ids)
        if len(row.block_tables[0]) > row.first_changed_block:
            self._replace_blocks(place, row)

    def _replace_blocks(self, place: int, row: ScheduledRow) -> None:
        begin, end = row.first_changed_block, len(row.block_tables[0])
        if any(len(table) != end for table in row.block_tables):
            raise ExecutionError(f"sequence {row.seq_id} has block tables of unequal lengths")
        changed = np.array([table[begin:] for table in row.block_tables], dtype=np.int64)
        if changed.min() < 0 or changed.max() >= self._num_blocks:
            raise ExecutionError(
                f"sequence {row.seq_id} has a block outside the pool of {self._num_blocks}"
            )
        if end > self.block_tables.shape[2]:
            raise ExecutionError(
                f"sequence {row.seq_id} has {end} blocks, beyond the model's window"
            )
        self.block_tables[:, place, begin:end] = changed

    def _check_tokens(self, seq_id: int, token_ids: NDArray[np.int64]) -> None:
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self._vocab_size:
            raise ExecutionError(f"sequence {seq_id} has a token outside the vocabulary")
