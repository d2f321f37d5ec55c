"""Whose request it is: the name that goes with its API key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

_KEY = "octavo.tenant"


def note_tenant(scope: Scope, name: str) -> None:
    """The request's key is accepted and belongs to ``name``."""
    scope[_KEY] = name


def tenant_of(request: Request) -> str | None:
    """The tenant; ``None`` where no keys are needed."""
    return tenant_of_scope(request.scope)


def tenant_of_scope(scope: Scope) -> str | None:
    """:func:`tenant_of` for middleware."""
    name: str | None = scope.get(_KEY)
    return name
