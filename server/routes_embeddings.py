"""``POST /v1/embeddings``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .body import read_json
from .context import Context
from .embeddings import (
    MAX_INPUTS,
    EmbeddingJob,
    EmbeddingRequest,
    embedding_answer,
    embedding_requests,
    pooling_params,
)
from .fields import check_lengths, check_supported
from .prompts import parse_prompts, truncation
from .request_headers import priority
from .request_ids import request_id
from .schemas import body_schema, parse
from .streaming import until_disconnect
from .submission import submit

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": (False,),
}


def embeddings_router(context: Context) -> APIRouter:
    """The route, over its collaborators."""
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
    async def create_embedding(request: Request) -> Response:
        """Turn inputs into vectors: the model's last hidden states, pooled."""
        arrival_time = time.monotonic()
        context.check_accepting()
        raw = await read_json(request)
        job = _understood(context, request, raw, arrival_time)
        streams = await submit(context, request, embedding_requests(job))
        try:
            return await until_disconnect(request.receive, embedding_answer(streams, job))
        finally:
            for stream in streams:
                stream.abort()

    return router


def _understood(
    context: Context, request: Request, raw: Mapping[str, Any], arrival_time: float
) -> EmbeddingJob:
    check_lengths(raw)
    check_supported(raw, _NEUTRAL)
    body = parse(EmbeddingRequest, raw)
    context.unknown_fields.notice(raw, {*EmbeddingRequest.model_fields, *_NEUTRAL})
    context.check_model(body.model)
    prompts = parse_prompts(
        body.input,
        add_special_tokens=body.add_special_tokens is not False,
        name="input",
        most=MAX_INPUTS,
    )
    return EmbeddingJob(
        name=request_id(request),
        model_name=context.model_name,
        prompts=prompts,
        pooling=pooling_params(body),
        is_base64=body.encoding_format == "base64",
        arrival_time=arrival_time,
        truncation=truncation(body.truncate_prompt_tokens, body.truncation_side),
        cache_salt=body.cache_salt,
        priority=priority(request, body.priority),
    )
