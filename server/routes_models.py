"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..engine.errors import EngineNotReadyError, ModelNotFoundError
from .context import Context
from .errors import json_response


def models_router(context: Context) -> APIRouter:
    """The routes, over their collaborators."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The served names, one model each."""
        cards = [_card(context, name) for name in context.model_names]
        return json_response({"object": "list", "data": cards})

    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        """One served model."""
        if not model_id:
            raise ModelNotFoundError("No model is named in the path.")
        context.check_model(model_id)
        return json_response(_card(context, model_id))

    return router


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.model_name,
        "parent": None,
        **_facts(context),
    }


def _facts(context: Context) -> dict[str, Any]:
    """What the engine knows of the model; nulls while it is loading."""
    try:
        info = context.engine.info
    except EngineNotReadyError:
        return {"max_model_len": None, "default_sampling_params": None}
    return {
        "max_model_len": info.max_model_len,
        "default_sampling_params": dict(info.default_sampling),
    }
