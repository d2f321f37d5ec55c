"""What clients send to ``POST /v1/embeddings``, and what they receive.

An answer may have tens of megabytes. Its entries are encoded one by one, as they come from the engine, and
sent one by one: all of them at once would hold up every other request.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.api import (
    FinishReason,
    GenerationRequest,
    PoolingParams,
    Prompt,
    RequestStream,
    SamplingParams,
    unpack_floats,
)
from ..engine.errors import EngineNotReadyError, InvalidRequestError
from .errors import GenerationFailedError
from .prompts import Truncation
from .request_ids import engine_request_ids
from .schemas import Int64, Wire
from .wire import Usage

MAX_INPUTS = 2048

_encode = msgspec.json.Encoder().encode


class EmbeddingRequest(Wire):
    """The body of ``POST /v1/embeddings``."""

    model: str | None = None
    input: Annotated[
        Any,
        Field(description="A string, token ids, or a list of strings or of lists of token ids."),
    ] = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or the base64 of their little-endian float32."
    )
    dimensions: Int64 | None = Field(None, description="Only the first so many numbers.")
    pooling_type: Literal["last", "mean"] | None = Field(
        None, description="Of the last token's hidden state, or of all tokens' mean."
    )
    normalize: bool | None = Field(None, description="To length 1.")
    use_activation: bool | None = Field(None, description="Another name of normalize.")
    truncate_prompt_tokens: Int64 | None = Field(
        None, description="A longer input is cut to so many tokens; -1: to the window."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where the cut input loses its tokens."
    )
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(
        None, description="Cached blocks are shared only within one salt."
    )
    priority: Int64 | None = Field(
        None, description="Lower runs first; needs --scheduling-policy priority."
    )


@dataclass(frozen=True)
class EmbeddingJob:
    """What the route has understood of a request."""

    name: str
    model_name: str
    prompts: Sequence[Prompt]
    pooling: PoolingParams
    is_base64: bool
    arrival_time: float
    truncation: Truncation
    cache_salt: str | None
    priority: int


def pooling_params(body: EmbeddingRequest) -> PoolingParams:
    """Translate ``body``.

    Raises:
        InvalidRequestError: a value is out of range; ``param`` names it.
    """
    names = ("normalize", "use_activation")
    told = {value for name in names if (value := getattr(body, name)) is not None}
    if len(told) > 1:
        raise InvalidRequestError(
            "use_activation is another name of normalize, and they differ.", param="use_activation"
        )
    return PoolingParams(body.pooling_type, body.dimensions, told != {False})


def embedding_requests(job: EmbeddingJob) -> list[GenerationRequest]:
    """One per input."""
    ids = engine_request_ids(job.name, len(job.prompts))
    return [
        GenerationRequest(
            request_id,
            prompt,
            SamplingParams(max_tokens=0),
            job.arrival_time,
            job.priority,
            cache_salt=job.cache_salt,
            max_prompt_tokens=job.truncation.max_tokens,
            keeps_prompt_start=job.truncation.keeps_start,
            pooling=job.pooling,
        )
        for request_id, prompt in zip(ids, job.prompts, strict=True)
    ]


class JsonParts(Response):
    """A JSON answer that comes in pieces."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Content-Length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def embedding_answer(streams: Sequence[RequestStream], job: EmbeddingJob) -> JsonParts:
    """The whole answer.

    Raises:
        GenerationFailedError: an input has no embedding.
        EngineNotReadyError: the server ends before the work does.
        EngineDeadError: the engine does.
    """
    usage = Usage(prompt_tokens=sum(len(stream.prompt_token_ids) for stream in streams))
    head = {
        "id": f"embd-{job.name}",
        "object": "list",
        "created": int(time.time()),
        "model": job.model_name,
    }
    parts = [_encode(head)[:-1] + b',"data":[']
    for index, stream in enumerate(streams):
        embedding = await _embedding(stream, usage)
        entry = _entry(index, embedding, is_base64=job.is_base64)
        parts.append(b"," + entry if index else entry)
        await asyncio.sleep(0)  # many may be there at once
    parts.append(b'],"usage":' + _encode(usage.as_dict()) + b"}")
    return JsonParts(parts)


async def _embedding(stream: RequestStream, usage: Usage) -> bytes:
    error = "There is no embedding."
    async for output in stream:
        if output.embedding is not None:
            usage.cached_tokens += output.num_cached_tokens
            return output.embedding
        if FinishReason.ABORT in {one.finish_reason for one in output.outputs}:
            raise EngineNotReadyError("The server is shutting down.")
        error = output.error or error
    raise GenerationFailedError(error)


def _entry(index: int, embedding: bytes, *, is_base64: bool) -> bytes:
    if is_base64:
        numbers = b'"' + base64.b64encode(embedding) + b'"'
    else:
        numbers = _encode(unpack_floats(embedding))
    return b'{"index":%d,"object":"embedding","embedding":%b}' % (index, numbers)
