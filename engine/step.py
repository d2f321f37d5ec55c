"""What crosses between scheduling and execution in one step. Plain values: no tensor, no Sequence.

The scheduler decides, the executor computes, the scheduler commits. A plan is complete: an executor
that applies every plan of a sequence's life in order needs nothing else, whether it shares the process
or not. Types that exist once per row and step are named tuples, which are built fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .api import PoolingParams, SamplingParams


class NewRow(NamedTuple):
    """A sequence that the executor has not seen, or was told to remove (preemption, restart)."""

    seq_id: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # produced before a preemption or restart; counts for penalties
    sampling: SamplingParams
    seed: int  # of this sequence: the request's seed plus the child's index
    pooling: PoolingParams | None = None  # its prompt's embedding is wanted, all of it resolved


class Fork(NamedTuple):
    """A sequence that starts as a copy of another's sampling state."""

    parent_seq_id: int
    child_seq_id: int
    num_tokens: int  # tokens of the parent (prompt included) that the child starts with
    seed: int


class BlockCopy(NamedTuple):
    """Copy one block of one group, all its layers, before this step writes (copy-on-write).

    No block is both source and destination within a plan.
    """

    group: int
    src_block_id: int
    dst_block_id: int


class BlockSwap(NamedTuple):
    """Copy one block of one group, all its layers, between the device pool and the host tier.

    Swaps are executed in the plan's order, before the block copies and before this step writes: a block
    that one of them reads may be the target of a later one.
    """

    group: int
    device_block_id: int
    host_block_id: int
    to_host: bool


class ScheduledRow(NamedTuple):
    """Tokens of one sequence to compute in this step.

    Computes positions ``start .. start + num_tokens - 1``. ``block_tables`` may be live lists of the memory
    manager: ``Executor.submit`` reads what it needs before it returns. Entries of blocks that fell out of a
    group's window name any block, and are not sent again when they change.
    """

    seq_id: int
    start: int
    num_tokens: int
    num_samples: int  # tokens to draw from the last position's logits; 0 in mid-prefill
    block_tables: tuple[Sequence[int], ...]  # per KV group; covers start + num_tokens tokens
    first_changed_block: int  # table entries below this index equal those of the row's last plan
    num_unwritten: int = 0  # leading tokens whose KV lies in a shared block already: slot -1
    appended_token_ids: Sequence[int] = ()  # chosen by the scheduler, not the last sample (beams)
    num_candidates: int = 0  # beams: this many most likely next tokens; none is drawn or appended
    first_scored: int = 0  # position of the first prompt token whose log-probability is reported,
    num_scored: int = 0  # and their number; the token before each is in this row


class SampleLogprobs(NamedTuple):
    """Natural-log probabilities of a drawn token or one of the prompt, before any sampling filter."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first, or those named
    ranks: tuple[int, ...] = ()  # of those in ``top``, where they were named


class RowResult(NamedTuple):
    """What one sampled, scored or pooled row gave. ``error`` excludes everything else."""

    seq_id: int
    token_ids: Sequence[int]  # one per sample asked for; of a row that is only scored, none
    logprobs: Sequence[SampleLogprobs] | None = None  # one per sample or candidate, where asked
    candidates: Sequence[tuple[int, float]] | None = None  # (token id, logprob), most likely first
    prompt_logprobs: Sequence[SampleLogprobs] | None = None  # one per scored prompt token
    error: str | None = None  # a number was not finite; only this row is affected
    embedding: bytes | None = None  # of a pooled prompt whose last token this row computed; float32


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Applied in the order of the fields."""

    step_id: int
    forks: tuple[Fork, ...] = ()
    removed_seq_ids: tuple[int, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    block_swaps: tuple[BlockSwap, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    rows: tuple[ScheduledRow, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of the rows with samples, candidates, scored tokens or an embedding, in the plan's order."""

    step_id: int
    rows: tuple[RowResult, ...]
    swap_s: float = 0.0  # seconds that the block swaps took


class ExecutorRates(NamedTuple):
    """How fast the executor is, measured at warm-up: the first guess for what a preemption costs."""

    prefill_tokens_per_s: float
    swap_bytes_per_s: float  # one way; 0 without a host tier


class StepHandle(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled."""


class Executor(Protocol):
    """Computes steps, in the order of submission."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. Everything needed of ``plan`` is read before this returns."""
