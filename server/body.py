"""Reads a request's body as one JSON object, strictly.

Broken JSON, NaN, lone surrogates, other encodings than UTF-8 and nesting beyond what the parser
takes are a 400; another content type than JSON is a 415.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ..engine.errors import InvalidRequestError


async def read_json(request: Request) -> dict[str, Any]:
    """The decoded body.

    Raises:
        InvalidRequestError: not a JSON object.
        HTTPException: 415, the content type is not JSON.
    """
    _check_content_type(request.headers.get("content-type", ""))
    raw = await request.body()
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return body


def _check_content_type(header: str) -> None:
    media_type = header.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise HTTPException(415, "The Content-Type must be application/json.")
