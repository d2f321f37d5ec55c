"""What a generation request becomes at the engine's door: token ids and sampling parameters.

For schedulers and routers that want to know before they send. Nothing is computed, so that a seed which
was left open is still null.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..engine.api import RenderedRequest
from .context import Context
from .generation import Job, engine_requests
from .sent_names import named_as_sent


async def rendered(context: Context, job: Job) -> list[dict[str, Any]]:
    """One object for each prompt of ``job``.

    Raises:
        RequestError, EngineNotReadyError, EngineDeadError: as if it were to be computed.
    """
    with named_as_sent(job.sent_names):
        requests = await context.engine.render(engine_requests(job))
    return [_shape(context, job, request) for request in requests]


def _shape(context: Context, job: Job, request: RenderedRequest) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "model": context.model_name,
        "token_ids": request.prompt_token_ids,
        "sampling_params": msgspec.to_builtins(request.sampling, str_keys=True),
        "stream": job.is_streamed,
        "stream_options": _stream_options(job),
        "cache_salt": job.cache_salt,
        "priority": job.priority,
    }


def _stream_options(job: Job) -> dict[str, bool] | None:
    asked = {
        "include_usage": job.includes_usage,
        "continuous_usage_stats": job.repeats_usage,
    }
    return {name: True for name, is_on in asked.items() if is_on} or None
