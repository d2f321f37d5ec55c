"""Runs an admitted request: from the engine's outputs to an answer, whole or streamed.

Shared by every route that generates. A request with several prompts is several engine requests,
admitted together. Each has ``n`` choices: the indices of a prompt's are adjacent, prompt by prompt.
Where the choices are ranked (beams, ``best_of``) none is known before the end, so nothing can be streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from ..engine.api import (
    CompletionOutput,
    FinishReason,
    GenerationRequest,
    Prompt,
    RequestOutput,
    RequestStream,
    SamplingParams,
)
from ..engine.errors import NOTHING_LEFT, EngineDeadError, InvalidRequestError
from .context import Context
from .errors import GenerationFailedError, NothingToDrawError, describe, json_response
from .prompts import AS_IT_IS, Truncation
from .reports import NOTHING, PromptReport, Report, Tokens, output_tokens
from .request_ids import engine_request_ids
from .sent_names import SentNames, named_as_sent
from .streaming import LiveEventStream, until_disconnect
from .submission import submit
from .wire import DONE, Choice, Usage, Wire, error_event


@dataclass(frozen=True)
class Job:
    """What a route has understood of a request."""

    name: str  # of the request, in answers and headers
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    is_streamed: bool
    includes_usage: bool
    arrival_time: float
    cache_salt: str | None = None
    priority: int = 0
    repeats_usage: bool = False
    report: Report = NOTHING
    truncation: Truncation = AS_IT_IS
    sent_names: SentNames = field(default_factory=dict)

    @property
    def is_ranked(self) -> bool:
        """Whether the choices are the best of several, which is known at the end only."""
        return self.sampling.use_beam_search or self.sampling.is_best_of


async def answer(context: Context, request: Request, job: Job, wire: Wire) -> Response:
    """Admit ``job`` and answer it.

    Raises:
        RequestError, EngineNotReadyError, EngineDeadError: nothing was sent yet.
        ClientDisconnect: the client went away; the engine's requests are aborted.
    """
    if job.is_streamed and job.is_ranked:
        name = "a beam search" if job.sampling.use_beam_search else "best_of above n"
        raise InvalidRequestError(
            f"stream must be false with {name}: the best is known only at the end.", param="stream"
        )
    with named_as_sent(job.sent_names):
        streams = await submit(context, request, engine_requests(job))
    if job.is_streamed:
        events = _Events(streams, job, wire)
        return LiveEventStream(
            events, lambda: _abort(streams), keep_alive_s=context.keep_alive_interval_s
        )
    try:
        content = await until_disconnect(request.receive, _collect(streams, job, wire))
    finally:
        _abort(streams)
    return json_response(content)


def engine_requests(job: Job) -> list[GenerationRequest]:
    """One per prompt."""
    ids = engine_request_ids(job.name, len(job.prompts))
    return [
        GenerationRequest(
            request_id,
            prompt,
            job.sampling,
            job.arrival_time,
            job.priority,
            cache_salt=job.cache_salt,
            max_prompt_tokens=job.truncation.max_tokens,
            keeps_prompt_start=job.truncation.keeps_start,
            echo=job.report.has_echo,
            aligns_tokens=job.report.has_token_ids,
        )
        for request_id, prompt in zip(ids, job.prompts, strict=True)
    ]


async def pieces(
    stream: RequestStream, report: Report, usage: Usage
) -> AsyncGenerator[tuple[CompletionOutput, Tokens | None]]:
    """What the one sequence of ``stream`` produces, as it comes, and what ``report`` wants of its tokens.

    Args:
        usage: Has the prompt's tokens; the output's are added.

    Raises:
        EngineDeadError, GenerationFailedError: nothing more will come.
    """
    async for output in stream:
        _add(usage, output)
        for one in output.outputs:
            _check_failure(one, output.error)
            yield one, _tokens(report, one, output)


def _abort(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.abort()


class _Events:
    """The events of a stream, ``[DONE]`` included. A failure is an event of its own."""

    def __init__(self, streams: Sequence[RequestStream], job: Job, wire: Wire) -> None:
        n = job.sampling.n
        self._streams, self._n, self._wire = streams, n, wire
        self._includes_usage, self._repeats_usage = job.includes_usage, job.repeats_usage
        self._usage = _prompt_usage(streams)
        if self._repeats_usage:
            wire.repeat_usage(self._usage)
        self._num_running = len(streams)
        self._begun: set[int] = set()  # choices whose prompt has been told of
        self._chunks = [
            wire.opening(i * n + j, stream.prompt_token_ids)
            for i, stream in enumerate(streams)
            for j in range(n)
        ]
        self.is_ended = False

    def on_ready(self, callback: Callable[[], None]) -> None:
        for stream in self._streams:
            stream.on_ready(callback)

    def take(self) -> bytes:
        """What has come since the last time."""
        if self.is_ended:
            return b""
        try:
            for index, stream in enumerate(self._streams):
                output = stream.take()
                if output is not None:
                    self._add(index, output)
            if not self._num_running:
                self._end(self._wire.usage(self._usage) if self._includes_usage else b"")
        except (EngineDeadError, GenerationFailedError) as error:
            self._end(error_event(describe(error).body()))
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

    def _add(self, index: int, output: RequestOutput) -> None:
        _add(self._usage, output)
        if self._repeats_usage:
            self._wire.repeat_usage(self._usage)
        wire, begun, chunks = self._wire, self._begun, self._chunks
        for one in output.outputs:
            number = index * self._n + one.index
            if number not in begun:
                begun.add(number)
                chunks.append(wire.prompt(number, output))
            chunks.append(_chunk(wire, number, one, output))
        if output.finished:
            self._num_running -= 1

    def _end(self, last: bytes) -> None:
        self._chunks += (last, DONE)
        self.is_ended = True


def _chunk(wire: Wire, index: int, one: CompletionOutput, output: RequestOutput) -> bytes:
    tokens = _tokens(wire.report, one, output)
    if one.finish_reason is None:
        return wire.delta(index, one.text, tokens) if one.text or tokens else b""
    _check_failure(one, output.error)
    return wire.closing(index, one.text, one.finish_reason, one.stop_reason, tokens)


def _tokens(report: Report, one: CompletionOutput, output: RequestOutput) -> Tokens | None:
    if not report.tells_tokens:
        return None
    return output_tokens(one, len(output.prompt or "") if report.has_echo else 0)


async def _collect(streams: Sequence[RequestStream], job: Job, wire: Wire) -> dict[str, object]:
    """The whole answer."""
    n, usage = job.sampling.n, _prompt_usage(streams)
    entries = job.report.num_top is not None
    choices = [
        Choice(is_ranked=job.is_ranked, tokens=Tokens(entries=[] if entries else None))
        for _ in range(n * len(streams))
    ]
    async with aclosing(_merged(streams)) as outputs:
        async for index, output in outputs:
            _add(usage, output)
            if output.finished and job.report.tells_prompt:
                prompt = PromptReport.of(output)
                for choice in choices[index * n : (index + 1) * n]:
                    choice.prompt = prompt
            for one in output.outputs:
                _check_failure(one, output.error)
                choice = choices[index * n + one.index]
                choice.text.append(one.text)
                if tokens := _tokens(job.report, one, output):
                    choice.tokens.extend(tokens)
                choice.finish_reason = one.finish_reason
                choice.stop_reason = one.stop_reason
                choice.cumulative_logprob = one.cumulative_logprob
    return wire.whole(choices, usage)


def _check_failure(output: CompletionOutput, error: str | None) -> None:
    if output.finish_reason is FinishReason.ERROR:
        if error == NOTHING_LEFT:
            raise NothingToDrawError(f"The {error}.")
        raise GenerationFailedError(error or "The generation failed.")


def _prompt_usage(streams: Sequence[RequestStream]) -> Usage:
    return Usage(prompt_tokens=sum(len(stream.prompt_token_ids) for stream in streams))


def _add(usage: Usage, output: RequestOutput) -> None:
    for one in output.outputs:
        usage.completion_tokens += len(one.token_ids)
    if output.finished:
        usage.completion_tokens += output.num_discarded_tokens
        usage.cached_tokens += output.num_cached_tokens


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Outputs of all streams as they come, each with its stream's index."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(_next(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, following = waiting.pop(task), task.result()
                if following is not None:
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, following
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: RequestStream) -> RequestOutput | None:
    return await anext(stream, None)
