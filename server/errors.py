"""Errors on the wire: every failure becomes one JSON shape.

Owns the body ``{"error": {"message", "type", "param", "code"}}``, the status of each error of the
tree in ``engine.errors``, and the exception handlers of the application. ``type`` follows from the
status alone; ``code`` is a string where a client may want to branch on it, else null. Must not know
routes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..engine.errors import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    ModelNotFoundError,
    NotSupportedError,
    OctavoError,
    OverloadedError,
    RequestError,
)
from . import response_headers

NOT_READY_RETRY_S = 2
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients would send it again by themselves
CLIENT_CLOSED_REQUEST = 499  # never seen by a client; counted in http_requests_total

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_stalled",
    413: "request_too_large",
    415: "unsupported_media_type",
}


class GenerationFailedError(RequestError):
    """A sequence ended with ``FinishReason.ERROR``: a 500 for its request alone."""


class ResponseNotFoundError(RequestError):
    """The path names a response that is not stored: a 404."""


class RequestTimeoutError(GenerationFailedError):
    """A request's time is up before it has ended: a 504."""


class NothingToDrawError(GenerationFailedError):
    """A request's own rules forbid every token at some position: a 400."""


@dataclass(frozen=True)
class Failure:
    """One error, ready for the wire."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object that clients see."""
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The whole HTTP answer."""
        return json_response(self.body(), status=self.status, headers=self.headers)


def json_response(
    content: Mapping[str, Any] | Sequence[Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """``content`` as a JSON answer."""
    return Response(
        msgspec.json.encode(content),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def describe(error: OctavoError) -> Failure:
    """What an error of octavo's tree looks like over HTTP."""
    if isinstance(error, NotSupportedError):
        return Failure(400, error.message, error.param, error.code or "unsupported_parameter")
    if isinstance(error, ModelNotFoundError):
        return Failure(404, error.message, "model", "model_not_found")
    if isinstance(error, ResponseNotFoundError):
        return Failure(404, error.message, error.param, "response_not_found")
    if isinstance(error, OverloadedError):
        retry = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return Failure(429, error.message, error.param, error.code or "overloaded", retry)
    if isinstance(error, InvalidRequestError):
        return Failure(400, error.message, error.param, error.code)
    if isinstance(error, NothingToDrawError):
        return Failure(400, error.message, code="nothing_to_draw")
    if isinstance(error, RequestTimeoutError):
        return Failure(504, error.message, code="request_timeout", headers=NO_RETRY)
    if isinstance(error, GenerationFailedError):
        return Failure(500, error.message, error.param, error.code or "generation_failed")
    if isinstance(error, EngineNotReadyError):
        retry = {"Retry-After": str(NOT_READY_RETRY_S)}
        return Failure(503, str(error), code="engine_not_ready", headers=retry)
    if isinstance(error, EngineDeadError):
        retry = {"Retry-After": str(NOT_READY_RETRY_S)}
        return Failure(503, "The engine has ended.", code="engine_dead", headers=retry)
    return INTERNAL


INTERNAL = Failure(500, "The server had an error.", code="internal_error")


def describe_http(error: HTTPException) -> Failure:
    """What the web framework refuses: unknown paths, wrong methods, oversized bodies."""
    return Failure(
        error.status_code,
        str(error.detail),
        code=_CODES.get(error.status_code),
        headers=error.headers or {},
    )


def describe_validation(errors: Sequence[Mapping[str, Any]]) -> Failure:
    """The first of pydantic's complaints as one sentence, with the path of its field."""
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    param = field_path(path) or None
    name = param or "The body"
    message = str(first["msg"])
    if first["type"] == "missing":
        message = f"{name} is required."
    elif message.startswith("Input should"):
        message = f"{name}{message.removeprefix('Input')}."
    else:
        message = f"{name}: {message}."
    return Failure(400, message, param)


def field_path(parts: Sequence[str | int]) -> str:
    """``("messages", 0, "role")`` → ``messages[0].role``."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def install_handlers(app: FastAPI, on_overload: Callable[[str], None]) -> None:
    """Make every exception that leaves a route an answer in the one shape.

    The last resort answers 500 without detail; the framework raises the exception on, so that the
    traceback is logged by the HTTP server.

    Args:
        on_overload: Told of every request that is refused for want of room, and by which limit.
    """

    async def on_overloaded(request: Request, error: Exception) -> Response:
        if isinstance(error, OverloadedError):
            on_overload(error.reason)
        return await _on_octavo_error(request, error)

    app.add_exception_handler(OverloadedError, on_overloaded)
    app.add_exception_handler(OctavoError, _on_octavo_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_octavo_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, OctavoError):
        raise error
    return describe(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    failure = describe_http(error)
    if error.status_code == 404:
        message = f"Unknown path: {request.method} {request.url.path[:200]}"
        failure = Failure(404, message, code=failure.code, headers=failure.headers)
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path[:200]}."
        failure = Failure(405, message, code=failure.code, headers=failure.headers)
    return failure.response()


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return describe_validation(error.errors()).response()


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_unexpected(request: Request, _error: Exception) -> Response:
    """Answers outside of all middleware."""
    return replace(INTERNAL, headers=response_headers.own(request.scope)).response()
