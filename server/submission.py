"""The way of a checked request into the engine: what its connection says of it, beside its body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request

from ..engine.api import GenerationRequest, RequestStream
from .context import Context
from .deadlines import TimedStream, timeout_s
from .tenants import tenant_of


async def submit(
    context: Context,
    request: Request,
    requests: Sequence[GenerationRequest],
    *,
    is_awaited: bool = True,
) -> Sequence[RequestStream]:
    """Admit ``requests``, all or none.

    Args:
        is_awaited: Whether the client waits for the answer.

    Raises:
        RequestError, EngineNotReadyError, EngineDeadError: nothing was sent yet.
    """
    limit_s = timeout_s(request, context.request_timeout_s, is_awaited=is_awaited)
    if (tenant := tenant_of(request.scope)) is not None:
        requests = [replace(one, tenant=tenant.name, weight=tenant.weight) for one in requests]
    streams = await context.engine.submit(requests)
    if limit_s is None:
        return streams
    deadline = requests[0].arrival_time + limit_s
    return [TimedStream(one, deadline, context.metrics.timed_out) for one in streams]
