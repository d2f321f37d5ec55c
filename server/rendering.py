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
    with named_as_sent(job.length_param):
        requests = await context.engine.render(engine_requests(job))
    return [_shape(context, job, request) for request in requests]


def _shape(context: Context, job: Job, request: RenderedRequest) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "model": context.model_name,
        "token_ids": request.prompt_token_ids,
        "sampling_params": msgspec.to_builtins(request.sampling, str_keys=True),
        "stream": job.is_streamed,
        "stream_options": {"include_usage": True} if job.includes_usage else None,
        "cache_salt": job.cache_salt,
        "priority": 0,
    }
