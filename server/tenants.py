"""Whose request it is: the name and weight that go with its API key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

from .api_keys import Tenant

_KEY = "octavo.tenant"


def note_tenant(scope: Scope, tenant: Tenant) -> None:
    """The request's key is accepted and belongs to ``tenant``."""
    scope[_KEY] = tenant


def tenant_of(scope: Scope) -> Tenant | None:
    """Who asks; ``None`` where no keys are needed."""
    tenant: Tenant | None = scope.get(_KEY)
    return tenant


def owner_of(request: Request) -> str | None:
    """The name of :func:`tenant_of`, which stored responses have."""
    tenant = tenant_of(request.scope)
    return None if tenant is None else tenant.name
