"""Puts the HTTP application together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from .. import __version__
from ..engine.api import Engine
from ..engine.config.server_config import ServerConfig
from . import response_headers
from .api_keys import ApiKeys, api_keys
from .auth import AuthMiddleware
from .context import Context
from .drain import Drain, DrainMiddleware
from .errors import install_handlers
from .flight_recorder import FlightRecorder
from .http_metrics import HttpMetricsMiddleware
from .limits import BodyLimitMiddleware
from .metrics import Metrics
from .openapi import describe_routes
from .paths import RootPathMiddleware
from .response_headers import ResponseHeadersMiddleware
from .routes_chat import chat_router
from .routes_completions import completions_router
from .routes_debug import debug_router
from .routes_embeddings import embeddings_router
from .routes_models import models_router
from .routes_ops import ops_router
from .routes_responses import responses_router
from .routes_tokens import tokens_router
from .stalls import StallMiddleware


def create_app(
    engine: Engine,
    config: ServerConfig,
    model_names: tuple[str, ...],
    *,
    drain: Drain | None = None,
    keys: ApiKeys | None = None,
    recorder: FlightRecorder | None = None,
) -> FastAPI:
    """The application over ``engine``, which may still be loading.

    Args:
        engine: Receives the requests, and a sink for its statistics.
        config: Keys, and whether there are debug routes; where it listens is not the application's
            concern.
        model_names: Names that clients may use; answers carry the first.
        drain: Through it the caller refuses requests at shutdown and waits for running ones.
        keys: That clients need; if they are not given, those of ``config``.
        recorder: Is told of every step.
    """
    recorder = recorder or FlightRecorder(config.flight_recorder_steps)
    context = Context(
        engine,
        model_names,
        Metrics(engine, model_names[0], recorder.note),
        drain or Drain(),
        config.sse_keep_alive_interval,
        config.request_timeout,
    )
    engine.set_stats_sink(context.metrics)
    app = FastAPI(title="octavo", version=__version__, redirect_slashes=False)
    routers: list[Callable[[Context], APIRouter]] = [completions_router, chat_router]
    routers += [partial(responses_router, config=config)]
    routers += [embeddings_router]
    routers += [partial(tokens_router, has_info=config.enable_tokenizer_info_endpoint)]
    routers += [models_router, ops_router]
    if config.enable_debug_endpoints:
        routers.append(partial(debug_router, recorder=recorder))
    for make_router in routers:
        app.include_router(make_router(context))
    describe_routes(app)
    install_handlers(app, context.metrics.refused)
    # The last one added is the outermost.
    if config.client_stall_timeout:
        app.add_middleware(StallMiddleware, timeout_s=config.client_stall_timeout)
    app.add_middleware(BodyLimitMiddleware)
    if (accepted := keys or api_keys(config)) is not None:
        app.add_middleware(AuthMiddleware, keys=accepted)
    app.add_middleware(DrainMiddleware, drain=context.drain)
    app.add_middleware(
        HttpMetricsMiddleware, metrics=context.metrics.http, is_logged=config.enable_log_requests
    )
    if config.allowed_origins:  # outside of the keys: a preflight carries none
        _allow_origins(app, config)
    app.add_middleware(ResponseHeadersMiddleware, drain=context.drain)
    if config.root_path:
        app.add_middleware(RootPathMiddleware, root_path=config.root_path)
    return app


def _allow_origins(app: FastAPI, config: ServerConfig) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins or (),
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=(*response_headers.NAMES, "Retry-After"),
    )
