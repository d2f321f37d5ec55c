"""What a step means for one sequence: its token or its failure, as an update for the front end."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

from ..api import FinishReason
from ..step import SampleLogprobs
from .beam_search import Hypothesis
from .request import Request, Sequence, SequenceUpdate


def begun(request: Request) -> SequenceUpdate:
    """A request waits no more, and has no token yet."""
    first = request.sequences[0].index
    return SequenceUpdate(request.request_id, first, (), scheduled_time=request.scheduled_time)


def failed(request: Request, index: int, error: str) -> SequenceUpdate:
    """The end of a request's sequence ``index``, whose row could not be sampled."""
    return SequenceUpdate(
        request.request_id,
        index,
        (),
        FinishReason.ERROR,
        scheduled_time=request.scheduled_time,
        num_preemptions=request.num_preemptions,
        error=error,
    )


def scored(sequence: Sequence, logprobs: AbstractSequence[SampleLogprobs]) -> SequenceUpdate:
    """Log-probabilities of the request's next prompt tokens."""
    request = sequence.request
    request.num_scored_tokens += len(logprobs)
    return SequenceUpdate(request.request_id, sequence.index, (), prompt_logprobs=tuple(logprobs))


def unsampled(request: Request, index: int) -> SequenceUpdate:
    """The end of a sequence that was to be no longer than its prompt."""
    return SequenceUpdate(
        request.request_id,
        index,
        (),
        FinishReason.LENGTH,
        scheduled_time=request.scheduled_time,
        num_preemptions=request.num_preemptions,
        num_cached_tokens=request.num_cached_tokens,
    )


def pooled(sequence: Sequence, embedding: bytes) -> SequenceUpdate:
    """The end of a sequence whose prompt has become a vector."""
    request = sequence.request
    return SequenceUpdate(
        request.request_id,
        sequence.index,
        (),
        FinishReason.STOP,
        scheduled_time=request.scheduled_time,
        num_preemptions=request.num_preemptions,
        num_cached_tokens=request.num_cached_tokens,
        embedding=embedding,
    )


def appended(sequence: Sequence, token_id: int, logprobs: SampleLogprobs | None) -> SequenceUpdate:
    """Append a token to the sequence, and say what that means: more of it, or its end."""
    request = sequence.request
    is_first = len(sequence.token_ids) == sequence.num_prompt_tokens
    sequence.token_ids.append(token_id)
    reason = sequence.finish_reason()
    is_own_stop = reason is FinishReason.STOP and token_id in request.new.sampling.stop_token_ids
    return SequenceUpdate(
        request.request_id,
        sequence.index,
        (token_id,),
        reason,
        token_id if is_own_stop else None,
        request.scheduled_time if is_first else None,
        request.num_preemptions,
        None if logprobs is None else (logprobs,),
        num_cached_tokens=request.num_cached_tokens if is_first else 0,
    )


def hypothesis(request: Request, index: int, found: Hypothesis) -> SequenceUpdate:
    """The ``index``-th best answer of a beam search, whole."""
    last = found.token_ids[-1]
    is_stopped = last in request.stop_token_ids
    is_own_stop = is_stopped and last in request.new.sampling.stop_token_ids
    return SequenceUpdate(
        request.request_id,
        index,
        found.token_ids,
        FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        last if is_own_stop else None,
        request.scheduled_time,
        request.num_preemptions,
        found.logprobs,
        num_cached_tokens=request.num_cached_tokens,
        cumulative_logprob=found.cumulative_logprob,
    )
