"""A request and its sequences, as the scheduler sees them: token ids, progress, reasons to stop."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..api import FinishReason, PoolingParams, ResumedSequence, SamplingParams
from ..memory.block_hash import HashChain
from ..memory.block_table import SequenceBlocks
from ..step import SampleLogprobs
from .beam_search import BeamSearch
from .limits import SchedulingError

Rank = tuple[int, int]
"""A request's place in order of priority: of two requests the lower one comes first."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A checked request on its way to the scheduler. Everything that may vary is resolved.

    ``sampling.max_tokens`` is a number that fits, ``seed`` is drawn, ``prompt_token_ids`` are in range.
    """

    request_id: str
    prompt_token_ids: AbstractSequence[int]
    sampling: SamplingParams
    seed: int
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    resume: tuple[ResumedSequence, ...] = ()
    pooling: PoolingParams | None = None  # the prompt's embedding is wanted; nothing is drawn
    tenant: str | None = None  # who pays, with the policy "fair"
    weight: float = 1.0  # the tenant's share, against others'


class SequenceUpdate(NamedTuple):
    """What a step gave one sequence. Crosses to the front end."""

    request_id: str
    child_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the user's stop id that ended it; None for an end id
    scheduled_time: float | None = None  # monotonic seconds, with the first update
    num_preemptions: int = 0  # of the request, so far
    logprobs: tuple[SampleLogprobs, ...] | None = None
    error: str | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache; with the first token
    cumulative_logprob: float | None = None  # of a whole hypothesis of a beam search
    prompt_logprobs: tuple[SampleLogprobs, ...] | None = None  # of the request's next prompt tokens
    embedding: bytes | None = None  # with the end; little-endian float32


class SequenceStatus(Enum):
    """Where a sequence is. A preempted one waits again, keeping its tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One token stream of a request."""

    __slots__ = (
        "blocks",
        "chain",
        "index",
        "is_known",
        "max_num_tokens",
        "min_num_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_swapped_tokens",
        "num_unwritten_tokens",
        "request",
        "seq_id",
        "status",
        "stop_token_ids",
        "token_ids",
        "unsent_token_ids",
    )

    def __init__(
        self, seq_id: int, request: Request, index: int, token_ids: list[int], chain: HashChain
    ) -> None:
        sampling = request.new.sampling
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.token_ids = token_ids  # prompt and output
        self.num_prompt_tokens = len(request.new.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_unwritten_tokens = (
            0  # to be computed once more, over a block that has them already
        )
        self.num_swapped_tokens = 0  # computed when it was swapped out
        self.max_num_tokens = request.max_num_tokens
        self.min_num_tokens = self.num_prompt_tokens + sampling.min_tokens
        self.stop_token_ids = request.stop_token_ids
        self.status = SequenceStatus.WAITING
        self.chain = chain  # names of its blocks
        self.blocks: SequenceBlocks | None = None
        self.is_known = False  # to the executor
        self.unsent_token_ids: list[int] = []  # that the executor has not drawn itself

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def seed(self) -> int:
        return self.request.new.seed + self.index

    @property
    def live_blocks(self) -> SequenceBlocks:
        """Its block tables.

        Raises:
            SchedulingError: it has none.
        """
        if self.blocks is None:
            raise SchedulingError(f"sequence {self.seq_id} is computed without blocks")
        return self.blocks

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token; ``None`` if it goes on."""
        num_tokens = len(self.token_ids)
        if num_tokens > self.min_num_tokens and self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_num_tokens else None


class Request:
    """One API call: a prompt and the sequences that continue it."""

    __slots__ = (
        "beam_search",
        "host_block_ids",
        "is_resumed",
        "max_num_tokens",
        "new",
        "num_cached_tokens",
        "num_counted_prompt_tokens",
        "num_preemptions",
        "num_scored_tokens",
        "pending",
        "rank",
        "request_id",
        "scheduled_time",
        "sequences",
        "stop_token_ids",
    )

    def __init__(self, new: NewRequest, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        sampling = new.sampling
        self.new = new
        self.request_id = new.request_id
        self.max_num_tokens = max_model_len
        if sampling.max_tokens is not None:
            asked = len(new.prompt_token_ids) + sampling.max_tokens
            self.max_num_tokens = min(asked, max_model_len)
        own = frozenset(sampling.stop_token_ids)
        self.stop_token_ids = own if sampling.ignore_eos else own | eos_token_ids
        self.sequences: list[Sequence] = []  # of a beam search: the live beams
        self.pending: list[Sequence] = []  # fork from the first one when it has computed the prompt
        self.beam_search: BeamSearch | None = None
        if sampling.use_beam_search:
            max_new = self.max_num_tokens - len(new.prompt_token_ids)
            self.beam_search = BeamSearch(sampling, self.stop_token_ids, max_new)
        self.host_block_ids: list[int] = []  # that hold what was swapped out
        self.num_cached_tokens = 0
        self.is_resumed = any(one.output_token_ids for one in new.resume)
        self.num_counted_prompt_tokens = 0  # of the prompt, by the counters
        if self.is_resumed:  # by those of an earlier engine
            self.num_counted_prompt_tokens = len(new.prompt_token_ids)
        # Of the prompt: their log-probabilities are known, or not wanted. The first has none.
        has_scores = sampling.prompt_logprobs is not None
        self.num_scored_tokens = 1 if has_scores else len(new.prompt_token_ids)
        self.num_preemptions = 0
        self.rank: Rank = (0, 0)
        self.scheduled_time: float | None = None

    @property
    def is_running(self) -> bool:
        return any(s.status is SequenceStatus.RUNNING for s in self.sequences)

    @property
    def is_unscored(self) -> bool:
        """Whether prompt tokens' log-probabilities are wanted that are not known yet."""
        return self.num_scored_tokens < len(self.new.prompt_token_ids)

    @property
    def is_mean_pooled(self) -> bool:
        """Whether every prompt token's hidden state is wanted, and so has to be computed."""
        return self.new.pooling is not None and self.new.pooling.pooling_type == "mean"

    @property
    def unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]

    @property
    def num_unborn(self) -> int:
        """Beams that there may be and are not yet."""
        return 0 if self.beam_search is None else self.beam_search.width - len(self.sequences)

    @property
    def num_reserved_seats(self) -> int:
        """Seats kept for sequences that do not run yet."""
        return len(self.pending) + self.num_unborn
