"""A step while it is being put together."""

from __future__ import annotations

from ..memory.block_table import SequenceBlocks
from ..memory.kv_cache_manager import KVCacheManager
from ..step import BlockCopy, NewRow, ScheduledRow
from .request import Sequence


class StepDraft:
    """Rows and copies so far, and the tokens that may still be added."""

    def __init__(
        self, budget: int, memory: KVCacheManager, max_mixed_prefill_tokens: int | None = None
    ) -> None:
        self.budget = budget
        self._prefill_budget = budget
        self._max_mixed_prefill_tokens = max_mixed_prefill_tokens
        self.rows: list[ScheduledRow] = []
        self.new_rows: list[NewRow] = []
        self.copies: dict[int, list[BlockCopy]] = {}
        """Copy-on-write, by ``seq_id``."""
        self.prefix_copies: list[BlockCopy] = []
        """Hits inside a block."""
        self._memory = memory

    def keep_for_decoding(self, num_tokens: int) -> None:
        """Leave so much of the budget to sequences that decode, whatever comes before them.

        A step has a token for each sequence that may run, so that something is left for prompts.
        """
        self._prefill_budget -= num_tokens
        if num_tokens and self._max_mixed_prefill_tokens is not None:
            self._prefill_budget = min(self._prefill_budget, self._max_mixed_prefill_tokens)

    @property
    def has_room(self) -> bool:
        """Whether a prompt may be begun."""
        return min(self.budget, self._prefill_budget) > 0

    def most(self, num_owed: int) -> int:
        """How many tokens may be added for a sequence that is owed so many."""
        if num_owed > 1:
            num_owed = min(num_owed, self._prefill_budget)
        return min(num_owed, self.budget)

    @property
    def block_copies(self) -> tuple[BlockCopy, ...]:
        return (*(copy for own in self.copies.values() for copy in own), *self.prefix_copies)

    @property
    def num_copies_on_write(self) -> int:
        return sum(map(len, self.copies.values()))

    def introduce(self, sequence: Sequence) -> None:
        """Tell the executor of a sequence that it does not know."""
        new = sequence.request.new
        self.new_rows.append(
            NewRow(
                sequence.seq_id,
                new.prompt_token_ids,
                sequence.output_token_ids,
                new.sampling,
                sequence.seed,
                new.pooling,
            )
        )
        sequence.is_known = True

    def put(self, sequence: Sequence, start: int, count: int) -> None:
        """Add a row; blocks that it fills are findable from here on."""
        blocks, size = sequence.live_blocks, self._memory.block_size
        self.rows.append(_row(sequence, blocks, start, count))
        self.budget -= count
        if count > 1 or start < sequence.num_prompt_tokens - 1:
            self._prefill_budget -= count
        elif self._max_mixed_prefill_tokens is not None:
            self._prefill_budget = min(self._prefill_budget, self._max_mixed_prefill_tokens)
        if start % size + count >= size:
            self._memory.publish(blocks, sequence.token_ids, start, start + count)

    def drop(self, seq_ids: set[int]) -> None:
        """Take out the rows and copies of running sequences, which are the last ones put in."""
        while self.rows and self.rows[-1].seq_id in seq_ids:
            num_tokens = self.rows.pop().num_tokens
            self.budget += num_tokens
            if num_tokens > 1:
                self._prefill_budget += num_tokens
        for seq_id in seq_ids:
            self.copies.pop(seq_id, None)


def _row(sequence: Sequence, blocks: SequenceBlocks, start: int, count: int) -> ScheduledRow:
    request, tables = sequence.request, blocks.tables
    first_changed = blocks.first_changed_block
    blocks.first_changed_block = len(tables[0])
    num_samples, end = 0, start + count
    if end == len(sequence.token_ids) < sequence.max_num_tokens:
        num_samples = 1
    num_candidates = 0
    if num_samples and request.beam_search is not None:
        num_samples, num_candidates = 0, request.beam_search.num_candidates
    elif num_samples and request.pending:
        num_samples += request.pending[-1].index - sequence.index  # sample i has seed + i
    first_scored, num_scored = request.num_scored_tokens, 0
    if first_scored < sequence.num_prompt_tokens:
        num_scored = max(0, min(end + 1, sequence.num_prompt_tokens) - first_scored)
    unsent, num_unwritten = sequence.unsent_token_ids, sequence.num_unwritten_tokens
    if not (unsent or num_candidates or num_unwritten or num_scored):
        return ScheduledRow(sequence.seq_id, start, count, num_samples, tables, first_changed)
    sequence.unsent_token_ids, sequence.num_unwritten_tokens = [], 0
    return ScheduledRow(
        sequence.seq_id,
        start,
        count,
        num_samples,
        tables,
        first_changed,
        num_unwritten,
        tuple(unsent),
        num_candidates,
        first_scored,
        num_scored,
    )
