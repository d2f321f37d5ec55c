"""From the engine's tokens to a caller's text: detokenising, stop strings, times, finish reasons.

One :class:`RequestState` per live request, in the front end or in the offline ``LLM``.
"""

from __future__ import annotations

from dataclasses import replace

from ..api import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ResumedSequence,
)
from ..scheduling.request import NewRequest, SequenceUpdate
from ..stats import RequestRecord, StatsSink
from ..step import SampleLogprobs
from ..text.detokenizer import Detokenizer
from ..text.stop import StopMatcher
from ..text.tokenizer import Tokenizer
from .admission import Admitted
from .best_of import BestOf
from .deltas import append_delta
from .token_text import TokenText, text_offsets


class _SequenceState:
    """Text of one sequence, as far as it may be shown."""

    __slots__ = (
        "cumulative_logprob",
        "detokenizer",
        "finish_reason",
        "is_plain",
        "last_token_time",
        "matcher",
        "min_tokens",
        "token_ids",
        "tokens",
    )

    def __init__(self, admitted: Admitted, tokenizer: Tokenizer) -> None:
        sampling = admitted.new.sampling
        self.detokenizer = (
            Detokenizer(
                tokenizer,
                skip_special_tokens=sampling.skip_special_tokens,
                keep_leading_space=admitted.is_continuation,
            )
            if sampling.detokenize
            else None
        )
        self.tokens = (
            TokenText(self.detokenizer) if self.detokenizer and admitted.aligns_tokens else None
        )
        self.matcher = (
            StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
            if sampling.stop
            else None
        )
        self.is_plain = self.tokens is None and self.matcher is None
        self.min_tokens = sampling.min_tokens
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.last_token_time: float | None = None

    def text_of(
        self,
        token_ids: tuple[int, ...],
        is_last: bool,
        logprobs: list[dict[int, Logprob]] | None = None,
    ) -> tuple[str, str | None]:
        """Text that ``token_ids`` make final, and the stop string that it ends with, if any.

        Stop strings count from the first token after ``min_tokens``.
        """
        if self.detokenizer is None:
            return "", None
        if self.tokens is None:
            text = self.detokenizer.push(token_ids)
        else:
            text = self.tokens.push(token_ids, logprobs)
        if is_last:
            text += self.detokenizer.finish() if self.tokens is None else self.tokens.finish()
        if self.matcher is None or len(self.token_ids) <= self.min_tokens:
            return text, None
        text, matched = self.matcher.push(text)
        if is_last and matched is None:
            text += self.matcher.flush()
        return text, matched


class RequestState:
    """A live request on the caller's side."""

    def __init__(self, admitted: Admitted, tokenizer: Tokenizer) -> None:
        self.admitted = admitted
        self.request_id = admitted.new.request_id
        self.metrics = RequestMetrics(arrival_time=admitted.new.arrival_time)
        self.prompt_token_ids = list(admitted.new.prompt_token_ids)
        self._tokenizer = tokenizer
        sampling = admitted.new.sampling
        self._is_ranked = sampling.use_beam_search or sampling.is_best_of
        self._begin()
        self._most_tokens = 0  # that an engine had given when ranked choices started over
        self._num_cached_tokens = 0
        self._num_discarded_tokens = 0
        self._has_prompt_logprobs = sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._prompt_text_offsets: list[int] | None = None
        self._first_prompt_token = b""
        if admitted.echo:
            self._prompt_text_offsets = self._offsets(admitted)
            self._first_prompt_token = tokenizer.token_bytes(self.prompt_token_ids[0])
        self._finish_reason: FinishReason | None = None  # of the best choice, with best_of
        self._embedding: bytes | None = None

    def _begin(self) -> None:
        """No sequence has a token."""
        sampling = self.admitted.new.sampling
        num_sequences = sampling.n if sampling.use_beam_search else sampling.num_sequences
        self._sequences = [
            _SequenceState(self.admitted, self._tokenizer) for _ in range(num_sequences)
        ]
        self._num_unfinished = num_sequences
        self._best_of = BestOf(sampling) if sampling.is_best_of else None

    @property
    def is_finished(self) -> bool:
        return not self._num_unfinished

    def has_gained(self) -> bool:
        """Whether there are more tokens than ever, asked after some have come. Ranked choices may have started over."""
        if not self._is_ranked:
            return True
        num_tokens = sum(len(sequence.token_ids) for sequence in self._sequences)
        is_more = num_tokens > self._most_tokens
        self._most_tokens = max(num_tokens, self._most_tokens)
        return is_more

    def resume(self) -> NewRequest:
        """The request as an engine that does not know it has to be told of it.

        Sequences go on after the tokens that have come, and so give those that they would have given. Ranked
        choices, of which nothing was told yet, start over.
        """
        new = self.admitted.new
        if self._is_ranked:
            self._begin()
        elif any(sequence.token_ids for sequence in self._sequences):
            resume = tuple(
                ResumedSequence(tuple(s.token_ids), s.finish_reason is not None)
                for s in self._sequences
            )
            new = replace(new, resume=resume)
        if self._has_prompt_logprobs:
            if self._whole_prompt_logprobs is None:
                self._prompt_logprobs = [None]
            else:  # they are told once
                sampling = new.sampling.with_changes(prompt_logprobs=None)
                new = replace(new, sampling=sampling)
        return new

    def apply(
        self, update: SequenceUpdate, now: float, sink: StatsSink | None = None
    ) -> tuple[RequestOutput, tuple[int, ...]]:
        """:meth:`advance`, and what it gives as a :class:`RequestOutput`."""
        outputs, error, stopped = self.advance(update, now, sink)
        return self.output(outputs, error), stopped

    def advance(
        self, update: SequenceUpdate, now: float, sink: StatsSink | None = None
    ) -> tuple[list[CompletionOutput], str | None, tuple[int, ...]]:
        """Take in what one step gave one sequence.

        Returns:
            The deltas; why one of them is a failure; and the child indices of sequences that have just
            ended here while the engine goes on with them. There is no delta for a sequence that has ended
            before, and with ``best_of`` none until the last sequence has.
        """
        if update.prompt_logprobs is not None:
            self._add_prompt_logprobs(update.prompt_logprobs)
        if update.embedding is not None:
            self._embedding = update.embedding
        if update.scheduled_time is not None and self.metrics.scheduled_time is None:
            self.metrics.scheduled_time = update.scheduled_time
        sequence = self._sequences[update.child_index]
        is_empty = not update.token_ids and update.finish_reason is None
        if is_empty or sequence.finish_reason is not None:
            return [], None, ()
        if update.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = update.num_cached_tokens
        self._note_times(sequence, update, now, sink)
        output = self._advance(sequence, update)
        if output.finish_reason is None and self._best_of is None:
            return [output], None, ()
        is_stopped_here = output.finished and update.finish_reason is None
        stopped = (update.child_index,) if is_stopped_here else ()
        if output.finish_reason is FinishReason.ERROR and self._is_ranked:
            return self._fail(output, update.error)
        if self._best_of is None:
            return [output], update.error, stopped
        self._best_of.add(output, update.logprobs or ())
        return self._select() if self.is_finished else [], None, stopped

    def _advance(self, sequence: _SequenceState, update: SequenceUpdate) -> CompletionOutput:
        """What ``update`` adds to its sequence: text, and why it ends if it does."""
        sequence.token_ids += update.token_ids
        if sequence.is_plain and update.finish_reason is None and update.logprobs is None:
            text, _ = sequence.text_of(update.token_ids, False)
            return CompletionOutput(update.child_index, text, list(update.token_ids))
        reason, stop_reason = update.finish_reason, None
        shown, hidden = update.token_ids, update.token_ids[:0]
        if reason is FinishReason.STOP:
            stop_reason = self._stop_reason(update)
            if not self.admitted.new.sampling.include_stop_str_in_output:
                shown, hidden = shown[:-1], shown[-1:]
        logprobs = self._logprobs(update)
        text, matched = sequence.text_of(shown, reason is not None, logprobs)
        is_cut_id = bool(hidden) and isinstance(stop_reason, str)
        if matched is not None:
            reason, stop_reason = FinishReason.STOP, matched
        if reason is not None:
            self._end(sequence, reason)
        output = CompletionOutput(
            update.child_index,
            text,
            list(update.token_ids),
            self._cumulative_logprob(sequence, update),
            logprobs,
            reason,
            stop_reason,
        )
        if sequence.tokens is not None:
            for token_id in hidden:
                sequence.tokens.push_silent(token_id, logprobs[-1] if logprobs else None)
            sequence.tokens.give(output, is_last=reason is not None, is_cut=matched is not None)
            output.num_cut_tokens = output.num_cut_tokens or int(is_cut_id)
        return output

    def _cumulative_logprob(self, sequence: _SequenceState, update: SequenceUpdate) -> float | None:
        if update.cumulative_logprob is not None:  # of a beam, with all that it was ranked by
            return update.cumulative_logprob
        if update.logprobs is None or self.admitted.new.sampling.logprobs is None:
            return None
        sequence.cumulative_logprob += sum(sample.logprob for sample in update.logprobs)
        return sequence.cumulative_logprob

    def _end(self, sequence: _SequenceState, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._num_unfinished -= 1

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> RequestOutput:
        """End every unfinished sequence; text held back is given out.

        With ``best_of`` nothing was given out before, so that all of the choices end here.
        """
        outputs = self._end_unfinished(reason)
        if self._best_of is None:
            return self.output(outputs, None)
        for output in outputs:
            self._best_of.add(output, ())
        return self.output(self._select(reason), None)

    def _end_unfinished(self, reason: FinishReason) -> list[CompletionOutput]:
        outputs = []
        for index, sequence in enumerate(self._sequences):
            if sequence.finish_reason is None:
                text, _ = sequence.text_of((), True)
                self._end(sequence, reason)
                output = CompletionOutput(index, text, [], finish_reason=reason)
                if sequence.tokens is not None:
                    sequence.tokens.give(output, is_last=True, is_cut=False)
                outputs.append(output)
        return outputs

    def _fail(
        self, failed: CompletionOutput, error: str | None
    ) -> tuple[list[CompletionOutput], str | None, tuple[int, ...]]:
        """One of the sequences to choose from has an error: there is no best one."""
        ended = self._end_unfinished(FinishReason.ERROR)
        if self._best_of is None:
            return [failed, *ended], error, ()
        outputs = self._select(FinishReason.ERROR)
        return outputs, error, tuple(output.index for output in ended)

    def _select(self, reason: FinishReason | None = None) -> list[CompletionOutput]:
        """The choices of a ``best_of`` request, all ended by ``reason`` where one is given."""
        if self._best_of is None:
            return []
        outputs, self._num_discarded_tokens = self._best_of.select()
        if reason is not None:
            for output in outputs:
                output.finish_reason, output.stop_reason = reason, None
        self._finish_reason = outputs[0].finish_reason
        return outputs

    def record(self, now: float) -> RequestRecord:
        """The finished request, for histograms."""
        new, metrics = self.admitted.new, self.metrics
        scheduled, first, last = (
            metrics.scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
        )
        if new.sampling.use_beam_search:
            first = None  # all tokens came at once, at the end
        reasons = [s.finish_reason for s in self._sequences if s.finish_reason is not None]
        counts = [len(s.token_ids) for s in self._sequences]
        return RequestRecord(
            finish_reason=self._finish_reason or (reasons[0] if reasons else FinishReason.ABORT),
            num_prompt_tokens=len(new.prompt_token_ids),
            num_generation_tokens=sum(counts),
            max_num_generation_tokens=max(counts),
            num_cached_tokens=self._num_cached_tokens,
            n=new.sampling.n,
            max_tokens=new.sampling.max_tokens or 0,
            num_preemptions=metrics.num_preemptions,
            e2e_s=now - metrics.arrival_time,
            queue_s=_between(metrics.arrival_time, scheduled),
            prefill_s=_between(scheduled, first),
            decode_s=_between(first, last),
            inference_s=_between(scheduled, last),
        )

    def _note_times(
        self, sequence: _SequenceState, update: SequenceUpdate, now: float, sink: StatsSink | None
    ) -> None:
        metrics = self.metrics
        if update.num_preemptions > metrics.num_preemptions:
            metrics.num_preemptions = update.num_preemptions
        if not update.token_ids:
            return
        previous, sequence.last_token_time = sequence.last_token_time, now
        metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            if sink is not None:
                sink.record_first_token(now - metrics.arrival_time)
        if previous is not None and sink is not None:
            sink.record_inter_token(now - previous)

    def _stop_reason(self, update: SequenceUpdate) -> int | str | None:
        stop_id = update.stop_token_id
        return None if stop_id is None else self.admitted.stop_strings_by_id.get(stop_id, stop_id)

    def _logprobs(self, update: SequenceUpdate) -> list[dict[int, Logprob]] | None:
        if update.logprobs is None or self.admitted.new.sampling.logprobs is None:
            return None
        entries = []
        for token_id, sample in zip(update.token_ids, update.logprobs, strict=True):
            entries.append(self._entry(token_id, sample))
        return entries

    def _add_prompt_logprobs(self, samples: tuple[SampleLogprobs, ...]) -> None:
        first = len(self._prompt_logprobs)
        token_ids = self.prompt_token_ids[first : first + len(samples)]
        self._prompt_logprobs += map(self._entry, token_ids, samples)

    def _entry(self, token_id: int, sample: SampleLogprobs) -> dict[int, Logprob]:
        """A token's own log-probability, then the alternatives: most likely first, or as named."""
        entry = {token_id: self._logprob(token_id, sample.logprob, sample.rank)}
        ranks = sample.ranks or range(1, len(sample.top) + 1)
        for rank, (other_id, logprob) in zip(ranks, sample.top, strict=True):
            if other_id not in entry:
                entry[other_id] = self._logprob(other_id, logprob, rank)
        return entry

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        tokenizer = self._tokenizer
        return Logprob(
            logprob, rank, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        )

    def _offsets(self, admitted: Admitted) -> list[int]:
        detokenizer = Detokenizer(
            self._tokenizer, skip_special_tokens=admitted.new.sampling.skip_special_tokens
        )
        return text_offsets(detokenizer, self.prompt_token_ids, len(admitted.prompt or ""))

    def output(self, outputs: list[CompletionOutput], error: str | None) -> RequestOutput:
        """Deltas with what is known of their request at this moment."""
        return RequestOutput(
            self.request_id,
            self.admitted.prompt,
            self.prompt_token_ids,
            outputs,
            not self._num_unfinished,
            self._num_cached_tokens,
            self._num_discarded_tokens,
            self._whole_prompt_logprobs,
            self._prompt_text_offsets,
            self._first_prompt_token,
            self.metrics,
            error,
            self._embedding,
        )

    @property
    def _whole_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Those of all prompt tokens, once they are known."""
        if not self._has_prompt_logprobs:
            return None
        is_whole = len(self._prompt_logprobs) == len(self.prompt_token_ids)
        return self._prompt_logprobs if is_whole else None


def merge(into: RequestOutput, new: RequestOutput) -> None:
    """Append a delta to an earlier one that nobody has taken yet."""
    merge_outputs(into.outputs, new.outputs)
    into.finished = new.finished
    into.num_cached_tokens = new.num_cached_tokens
    into.num_discarded_tokens = new.num_discarded_tokens
    into.prompt_logprobs = new.prompt_logprobs
    into.error = new.error or into.error
    into.embedding = new.embedding


def merge_outputs(into: list[CompletionOutput], new: list[CompletionOutput]) -> None:
    """Append deltas to earlier ones."""
    by_index = {output.index: output for output in into}
    for output in new:
        earlier = by_index.get(output.index)
        if earlier is None:
            into.append(output)
            continue
        append_delta(earlier, output)
        if output.cumulative_logprob is not None:
            earlier.cumulative_logprob = output.cumulative_logprob


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
