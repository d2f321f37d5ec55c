"""What is for people who look inside: ``GET /debug/kv``, ``GET /debug/steps``, ``POST /reset_prefix_cache``.

Only there with ``--enable-debug-endpoints``; with ``--api-key``, behind it.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .context import Context
from .errors import json_response
from .flight_recorder import FlightRecorder
from .streaming import until_disconnect


def debug_router(context: Context, recorder: FlightRecorder) -> APIRouter:
    """The routes, over their collaborators."""
    router = APIRouter(tags=["debug"])

    @router.get("/debug/kv")
    async def get_kv(request: Request) -> Response:
        """Every KV block and every sequence, as they are between two steps."""
        snapshot = await until_disconnect(request.receive, context.engine.kv_snapshot())
        return json_response(
            {
                "num_blocks": snapshot.num_blocks,
                "block_size": snapshot.block_size,
                "blocks": snapshot.blocks,
                "sequences": snapshot.sequences,
            }
        )

    @router.get("/debug/steps")
    async def get_steps() -> Response:
        """The engine's last steps, from memory: it is not asked."""
        return json_response({"steps": recorder.steps()})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Forget every cached prefix; running requests go on."""
        await until_disconnect(request.receive, context.engine.reset_prefix_cache())
        return json_response({"success": True})

    return router
