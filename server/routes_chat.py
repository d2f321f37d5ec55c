"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .body import read_json
from .chat_messages import chat_prompt
from .context import Context
from .errors import json_response
from .fields import check_lengths, check_supported
from .generation import Job, answer
from .prompts import truncation
from .rendering import rendered
from .reports import chat_report
from .request_headers import priority
from .request_ids import request_id
from .sampling import sampling_params
from .schemas import ChatCompletionRequest, body_schema, parse
from .sent_names import named_as_sent, sent_names
from .wire import ChatWire, Wire


def chat_router(context: Context) -> APIRouter:
    """The route, over its collaborators."""
    router = APIRouter(tags=["generation"])

    async def understood(request: Request) -> tuple[Job, Wire]:
        arrival_time = time.monotonic()
        context.check_accepting()
        raw = await read_json(request)
        check_lengths(raw)
        check_supported(raw)
        body = parse(ChatCompletionRequest, raw)
        context.unknown_fields.notice(raw, ChatCompletionRequest.model_fields)
        context.check_model(body.model)
        prompt, info = chat_prompt(body), context.engine.info
        report, names = chat_report(body, info.max_logprobs), sent_names(body)
        with named_as_sent(names):
            sampling = sampling_params(body, info.default_sampling, report, max_tokens=None)
        job = Job(
            name=request_id(request),
            prompts=[prompt],
            sampling=sampling,
            is_streamed=bool(body.stream),
            includes_usage=body.includes_usage,
            arrival_time=arrival_time,
            cache_salt=body.cache_salt,
            priority=priority(request, body.priority),
            repeats_usage=body.repeats_usage,
            report=report,
            truncation=truncation(body.truncate_prompt_tokens, body.truncation_side),
            sent_names=names,
        )
        wire = ChatWire(
            f"chatcmpl-{job.name}", context.model_name, has_usage=body.includes_usage, report=report
        )
        if body.echo and prompt.messages[-1]["role"] == "assistant":
            wire.echo = prompt.messages[-1]["content"]
        return job, wire

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, streamed or whole."""
        job, wire = await understood(request)
        return await answer(context, request, job, wire)

    @router.post("/v1/chat/completions/render", openapi_extra=body_schema(ChatCompletionRequest))
    async def render_chat_completion(request: Request) -> Response:
        """What the engine would be given. Computes nothing."""
        job, _ = await understood(request)
        return json_response((await rendered(context, job))[0])

    return router
