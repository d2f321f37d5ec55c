"""What clients say of a request in headers of their own, beside its body."""

from __future__ import annotations

import re

from starlette.requests import Request

from ..engine.errors import InvalidRequestError

PRIORITY_HEADER = "X-Vllm-Priority"
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)


def priority(request: Request, in_body: int | None) -> int:
    """The request's priority: the header's, which gateways set, before the body's.

    Raises:
        InvalidRequestError: the header is not an integer of 64 bits.
    """
    text = request.headers.get(PRIORITY_HEADER)
    if text is None:
        return in_body or 0
    value = int(text) if _INTEGER.fullmatch(text.strip()) else 2**63
    if not -(2**63) <= value < 2**63:
        raise InvalidRequestError(
            f"{PRIORITY_HEADER} must be an integer that fits in 64 bits, got {text[:32]!r}.",
            param="priority",
        )
    return value
