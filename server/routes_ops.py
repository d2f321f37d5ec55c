"""What operators and orchestrators ask: is it alive, ready, how busy, which version.

``/health`` says whether the process should live, ``/ready`` whether it should get requests, ``/startup`` how far
its start has come.
``/ping`` is ``/health`` by the name that SageMaker knows.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from .. import __version__
from ..engine.errors import EngineDeadError, EngineNotReadyError
from .context import Context
from .errors import NOT_READY_RETRY_S, Failure, describe, json_response


def ops_router(context: Context) -> APIRouter:
    """The routes, over their collaborators."""
    router = APIRouter(tags=["operations"])

    @router.head("/ping", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    @router.get("/ping")
    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """200 while the engine lives, loads or is started again, 503 once it is given up."""
        context.engine.check_alive()
        return json_response({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """200 when requests are computed; 503 before, between two engines, and from a shutdown's start on."""
        try:
            context.check_ready()
        except (EngineNotReadyError, EngineDeadError) as error:
            return _not_ready(context, describe(error))
        return json_response({"status": "ready"})

    @router.head("/startup", include_in_schema=False)
    @router.get("/startup")
    async def startup() -> Response:
        """200 when the start is over; 503 with its stage and how much is done before."""
        context.engine.check_alive()
        progress = context.engine.progress
        is_over = progress.stage == "ready"
        content = {
            "status": "started" if is_over else "starting",
            "stage": progress.stage,
            "percent": round(100 * progress.fraction),
        }
        headers = {} if is_over else {"Retry-After": str(NOT_READY_RETRY_S)}
        return json_response(content, status=200 if is_over else 503, headers=headers)

    @router.get("/load")
    async def load() -> Response:
        """Requests in progress: every POST whose answer has not ended."""
        return json_response({"server_load": context.drain.num_active})

    @router.get("/version")
    async def version() -> Response:
        """octavo's version."""
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(context.metrics.render(), media_type=context.metrics.content_type)

    return router


def _not_ready(context: Context, failure: Failure) -> Response:
    progress = context.engine.progress
    content = {
        "status": "stopping" if context.drain.is_stopping else "not ready",
        "stage": progress.stage,
        "progress": round(progress.fraction, 3),
        **failure.body(),
    }
    return json_response(content, status=failure.status, headers=failure.headers)
