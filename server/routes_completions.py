"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .body import read_json
from .context import Context
from .errors import json_response
from .fields import check_lengths, check_supported
from .generation import Job, answer
from .prompts import parse_prompts, truncation
from .rendering import rendered
from .reports import completion_report
from .request_headers import priority
from .request_ids import request_id
from .sampling import sampling_params
from .schemas import CompletionRequest, body_schema, parse
from .sent_names import named_as_sent, sent_names
from .wire import CompletionWire, Wire

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_NEUTRAL: dict[str, tuple[Any, ...]] = {"top_logprobs": (0,)}


def completions_router(context: Context) -> APIRouter:
    """The route, over its collaborators."""
    router = APIRouter(tags=["generation"])

    async def understood(request: Request) -> tuple[Job, Wire]:
        arrival_time = time.monotonic()
        context.check_accepting()
        raw = await read_json(request)
        check_lengths(raw)
        check_supported(raw, _NEUTRAL)
        body = parse(CompletionRequest, raw)
        context.unknown_fields.notice(raw, {*CompletionRequest.model_fields, *_NEUTRAL})
        context.check_model(body.model)
        prompts = parse_prompts(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
        defaults, report = context.engine.info.default_sampling, completion_report(body)
        names = sent_names(body)
        with named_as_sent(names):
            sampling = sampling_params(body, defaults, report, max_tokens=DEFAULT_MAX_TOKENS)
        job = Job(
            name=request_id(request),
            prompts=prompts,
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
        wire = CompletionWire(
            f"cmpl-{job.name}", context.model_name, has_usage=body.includes_usage, report=report
        )
        return job, wire

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one prompt or several, streamed or whole."""
        job, wire = await understood(request)
        return await answer(context, request, job, wire)

    @router.post("/v1/completions/render", openapi_extra=body_schema(CompletionRequest))
    async def render_completion(request: Request) -> Response:
        """What the engine would be given: one object for each prompt. Computes nothing."""
        job, _ = await understood(request)
        return json_response(await rendered(context, job))

    return router
