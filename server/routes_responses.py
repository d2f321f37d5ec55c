"""``POST /v1/responses`` and what can be done with a response afterwards."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..engine.api import RequestStream
from ..engine.config.server_config import ServerConfig
from ..engine.errors import InvalidRequestError, RequestError
from .context import Context
from .errors import ResponseNotFoundError, json_response
from .responses_asked import Asked, understood
from .responses_events import EventLog, EventWriter
from .responses_queries import InputItemsQuery, RetrieveQuery, page, parse_query, query_schema
from .responses_request import ResponsesRequest
from .responses_run import Background, events, finish, joined
from .responses_state import ResponseState
from .responses_store import Entry, ResponseStore, Running, Stored
from .schemas import body_schema
from .streaming import EventStream, until_disconnect
from .tenants import owner_of


def responses_router(context: Context, config: ServerConfig) -> APIRouter:
    """The routes, over their collaborators."""
    router = APIRouter(tags=["responses"])
    store = ResponseStore(
        config.response_store_size, config.response_store_bytes, context.metrics.responses
    )
    background = Background(store, context.drain)

    @router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        """Answer a conversation: whole, streamed or in the background."""
        asked = await understood(context, store, request)
        state, stream = await asked.submit(context, request)
        if asked.body.background:
            return _answer_later(context, store, background, asked, state, stream)
        return await _answer(context, store, request, asked, state, stream)

    @router.get("/v1/responses/{response_id}", openapi_extra=query_schema(RetrieveQuery))
    async def get_response(request: Request, response_id: str) -> Response:
        """A stored response, or the events of one in the background."""
        query = parse_query(RetrieveQuery, request.query_params)
        entry = _found(store, request, response_id)
        if query.stream:
            return _events_of(context, entry, query.starting_after)
        if query.starting_after is not None:
            raise InvalidRequestError("starting_after needs stream=true.", param="starting_after")
        return _as_stored(entry)

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a response in the background. One that has ended stays as it is."""
        entry = _found(store, request, response_id)
        if not entry.is_background:
            raise InvalidRequestError(
                "Only a response that was created with background=true can be cancelled.",
                param="response_id",
            )
        if isinstance(entry, Running):
            background.cancel(entry)
        return _as_stored(entry)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response; one in the background ends."""
        entry = _found(store, request, response_id)
        if isinstance(entry, Running):
            background.cancel(entry)
        store.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.get(
        "/v1/responses/{response_id}/input_items", openapi_extra=query_schema(InputItemsQuery)
    )
    async def list_input_items(request: Request, response_id: str) -> Response:
        """The conversation that a response answers, without instructions."""
        query = parse_query(InputItemsQuery, request.query_params)
        return json_response(page(_found(store, request, response_id).items, query))

    return router


async def _answer(
    context: Context,
    store: ResponseStore,
    request: Request,
    asked: Asked,
    state: ResponseState,
    stream: RequestStream,
) -> Response:
    """Whole or streamed. A client that goes away ends it."""

    def keep() -> None:
        if asked.is_stored:
            store.keep(Stored.of(state, asked.items, None))

    if asked.body.stream:
        parts = joined(events(state, stream, EventWriter(state), keep))
        return EventStream(parts, stream.abort, keep_alive_s=context.keep_alive_interval_s)
    try:
        await until_disconnect(request.receive, finish(state, stream))
    finally:
        stream.abort()
    keep()
    return json_response(state.as_dict())


def _answer_later(
    context: Context,
    store: ResponseStore,
    background: Background,
    asked: Asked,
    state: ResponseState,
    stream: RequestStream,
) -> Response:
    """What there is at the start, or events from the start on; generation goes on by itself."""
    try:
        store.check_room(asked.items)  # others may have come since it was looked at first
    except RequestError:
        stream.abort()
        raise
    log = EventLog() if asked.body.stream else None
    running = Running(state, asked.items, stream, EventWriter(state), log)
    background.start(running)
    return _as_stored(running) if log is None else _events_of(context, running, None)


def _found(store: ResponseStore, request: Request, response_id: str) -> Entry:
    entry = store.get(response_id, owner_of(request))
    if entry is None:
        raise ResponseNotFoundError(
            f"No response with the id {response_id[:64]!r} is stored here.", param="response_id"
        )
    return entry


def _as_stored(entry: Entry) -> Response:
    return Response(entry.body, media_type="application/json")


def _events_of(context: Context, entry: Entry, starting_after: int | None) -> Response:
    if entry.log is None:
        raise InvalidRequestError(
            "stream needs a response that was created with background=true and stream=true.",
            param="stream",
        )
    after = -1 if starting_after is None else starting_after
    return EventStream(
        entry.log.after(after), lambda: None, keep_alive_s=context.keep_alive_interval_s
    )
