"""API keys: what is open, and what opens the rest."""

from __future__ import annotations

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from octavo.engine.api import Engine
from octavo.engine.config.server_config import ServerConfig
from octavo.server.api_keys import ApiKeys
from octavo.server.app import create_app
from octavo.server.auth import OPEN_PATHS

pytestmark = pytest.mark.anyio


async def test_open_routes_are_exactly_the_allowlist(
    guarded: httpx.AsyncClient, engine: Engine
) -> None:
    app = create_app(engine, ServerConfig(), ("tiny",))
    paths = set(app.openapi()["paths"])
    paths |= {route.path for route in app.routes if isinstance(route, (APIRoute, Route))}
    assert {"/v1/completions", "/v1/models/{model_id}", "/openapi.json", "/docs"} <= paths
    statuses = {path: (await guarded.get(path)).status_code for path in paths}
    assert {path for path, status in statuses.items() if status != 401} == OPEN_PATHS


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/V1/models", "/v1/../v1/models", "/%76%31/models", "/v1/%2e%2e/health"),
        *("/health/", "/health/../v1/models", "//health", "/Health", "/health%2f..%2fv1%2fmodels"),
        *("/nowhere", "/docs", "/openapi.json", "/redoc"),
    ],
)
async def test_no_spelling_of_a_path_opens_it(guarded: httpx.AsyncClient, path: str) -> None:
    request = guarded.build_request("GET", "http://octavo")
    request.url = request.url.copy_with(raw_path=path.encode())
    assert (await guarded.send(request)).status_code == 401


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        (b"", 401),
        (b"first", 401),
        (b"Basic first", 401),
        (b"Bearer", 401),
        (b"Bearer ", 401),
        (b"Bearer firs", 401),
        (b"Bearer xirst", 401),
        (b"Bearer firsu", 401),
        (b"Bearer first2", 401),
        (b"Bearer \xff\xfe", 401),
        (b"Bearer first", 200),
        (b"bearer first", 200),
        (b"BEARER  first ", 200),
        ("Bearer schlüssel".encode(), 200),
    ],
)
async def test_keys(guarded: httpx.AsyncClient, header: bytes | None, status: int) -> None:
    headers = [] if header is None else [(b"Authorization", header)]
    answer = await guarded.get("/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 401:
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr("octavo.server.api_keys.hmac.compare_digest", compare)
    assert ApiKeys(["a", "b", "c"]).tenant(b"Bearer a") is not None
    assert len(compared) == 3
