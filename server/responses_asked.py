"""From the body of ``POST /v1/responses`` to the conversation and the engine's request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from ..engine.api import ChatPrompt, RequestStream
from ..engine.errors import InvalidRequestError
from .body import read_json
from .context import Context
from .generation import Job, engine_requests
from .request_headers import priority
from .request_ids import request_id
from .responses_items import Item, conversation, parse_input
from .responses_request import KNOWN, ResponsesRequest, parse_request, response_report
from .responses_state import ResponseState, Status, asked_fields, new_response_id
from .responses_store import ResponseStore
from .responses_truncation import fitted
from .sampling import sampling_params
from .sent_names import SentNames, named_as_sent
from .submission import submit
from .tenants import owner_of

_NAMES: SentNames = {"max_tokens": "max_output_tokens", "messages": "input"}
_CONTINUABLE = (Status.COMPLETED, Status.INCOMPLETE)


@dataclass(frozen=True)
class Asked:
    """What has been understood of a request."""

    body: ResponsesRequest
    items: Sequence[Item]  # the whole conversation, without instructions
    job: Job
    is_stored: bool

    async def submit(
        self, context: Context, request: Request
    ) -> tuple[ResponseState, RequestStream]:
        """Let the engine begin.

        Raises:
            RequestError, EngineNotReadyError, EngineDeadError: it does not.
        """
        with named_as_sent(self.job.sent_names):
            (stream,) = await submit(
                context,
                request,
                engine_requests(self.job),
                is_awaited=not self.body.background,
            )
        fields = asked_fields(
            self.body, self.job.sampling, context.model_name, is_stored=self.is_stored
        )
        state = ResponseState(
            new_response_id(),
            fields,
            self.job.report,
            len(stream.prompt_token_ids),
            owner_of(request),
        )
        return state, stream


async def understood(context: Context, store: ResponseStore, request: Request) -> Asked:
    """Read, check and translate a request.

    Raises:
        RequestError: it is wrong; ``param`` names the field.
        EngineNotReadyError, EngineDeadError: nothing is accepted now.
    """
    arrival_time = time.monotonic()
    context.check_accepting()
    raw = await read_json(request)
    body = parse_request(raw)
    context.unknown_fields.notice(raw, KNOWN)
    context.check_model(body.model)
    given = parse_input(body.input)
    items = (*_previous(store, body.previous_response_id, owner_of(request)), *given)
    is_stored = body.store is not False and store.is_on
    if body.background:
        _check_background(store, items)
    report = response_report(body, context.engine.info.max_logprobs)
    limited = body.model_copy(update={"max_completion_tokens": body.max_output_tokens})
    with named_as_sent(_NAMES):
        sampling = sampling_params(
            limited, context.engine.info.default_sampling, report, max_tokens=None
        )
        prompt = await _prompt(context, body, items)
    job = Job(
        name=request_id(request),
        prompts=[prompt],
        sampling=sampling,
        is_streamed=bool(body.stream),
        includes_usage=True,
        arrival_time=arrival_time,
        cache_salt=body.cache_salt,
        priority=priority(request, body.priority),
        report=report,
        sent_names=_NAMES,
    )
    return Asked(body, items, job, is_stored)


def _previous(store: ResponseStore, response_id: str | None, owner: str | None) -> Sequence[Item]:
    """The conversation that is continued, the answer included."""
    if response_id is None:
        return ()
    entry = store.get(response_id, owner)
    if entry is None:
        raise InvalidRequestError(
            f"previous_response_id {response_id[:64]!r} is not stored here: it never was, or it was deleted or "
            "made room for others.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if entry.status not in _CONTINUABLE:
        raise InvalidRequestError(
            f"previous_response_id names a response with the status {entry.status}; one that is completed or "
            "incomplete can be continued.",
            param="previous_response_id",
        )
    return (*entry.items, *entry.output)


def _check_background(store: ResponseStore, items: Sequence[Item]) -> None:
    if not store.is_on:
        raise InvalidRequestError(
            "background needs stored responses, and this server keeps none (--response-store-size 0).",
            param="background",
        )
    store.check_room(items)


async def _prompt(context: Context, body: ResponsesRequest, items: Sequence[Item]) -> ChatPrompt:
    def prompt_of(part: Sequence[Item]) -> ChatPrompt:
        return conversation(body.instructions, part, body.chat_template_kwargs)

    if body.truncation == "auto":
        items = await fitted(context.engine, items, prompt_of, body.max_output_tokens or 1)
    return prompt_of(items)
