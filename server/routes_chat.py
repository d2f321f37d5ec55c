"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .body import read_json
from .chat_messages import chat_prompt
from .context import Context
from .fields import check_lengths, check_supported
from .generation import Job, answer, request_id
from .prompts import truncation
from .reports import chat_report
from .sampling import sampling_params
from .schemas import ChatCompletionRequest, body_schema, parse
from .wire import ChatWire

_NEUTRAL: dict[str, tuple[Any, ...]] = {"echo": (False,)}


def chat_router(context: Context) -> APIRouter:
    """The route, over its collaborators."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, streamed or whole."""
        arrival_time = time.monotonic()
        context.check_accepting()
        raw = await read_json(request)
        check_lengths(raw)
        check_supported(raw, _NEUTRAL)
        body = parse(ChatCompletionRequest, raw)
        context.unknown_fields.notice(raw, {*ChatCompletionRequest.model_fields, *_NEUTRAL})
        context.check_model(body.model)
        prompt, info = chat_prompt(body), context.engine.info
        report = chat_report(body, info.max_logprobs)
        job = Job(
            name=request_id(request),
            prompts=[prompt],
            sampling=sampling_params(body, info.default_sampling, report, max_tokens=None),
            is_streamed=bool(body.stream),
            includes_usage=body.includes_usage,
            arrival_time=arrival_time,
            cache_salt=body.cache_salt,
            report=report,
            truncation=truncation(body),
        )
        wire = ChatWire(
            f"chatcmpl-{job.name}", context.model_name, has_usage=body.includes_usage, report=report
        )
        return await answer(context, request, job, wire)

    return router
