"""The document at /openapi.json: every route with examples that work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app
from octavo.server.openapi import ROUTES

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

ALL = ServerConfig(enable_debug_endpoints=True, enable_tokenizer_info_endpoint=True)
BODIES = [
    (path, name, body) for (_, path), route in ROUTES.items() for name, body in route.bodies.items()
]


@pytest.fixture
def document(engine: FakeEngine) -> dict[str, Any]:
    return create_app(engine, ALL, ("tiny",)).openapi()


def test_every_route_is_described_and_nothing_else(document: dict[str, Any]) -> None:
    routes = {(m, path) for path, methods in document["paths"].items() for m in methods}
    assert routes == ROUTES.keys()


def test_routes_that_are_off_are_not_in_the_document(engine: FakeEngine) -> None:
    paths = create_app(engine, ServerConfig(), ("tiny",)).openapi()["paths"]
    assert not {"/debug/kv", "/tokenizer_info"} & paths.keys()


def test_every_body_has_examples(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                assert content["examples"], path


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "name", "body"), BODIES)
async def test_examples_work(
    client: httpx.AsyncClient, path: str, name: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    if not is_stream:
        assert is_like(answer.json(), ROUTES["post", path].answer)


@pytest.mark.anyio
async def test_example_answers_have_the_real_shape(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine, ALL, ("tiny",)))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        stored = await client.post("/v1/responses", json={"input": "hi"})
        names = {"{model_id}": "tiny", "{response_id}": stored.json()["id"]}
        for (method, path), route in ROUTES.items():
            if method == "get" and route.media_type == "application/json":
                filled = path
                for name, value in names.items():
                    filled = filled.replace(name, value)
                answer = await client.get(filled)
                if path not in ("/debug/kv", "/tokenizer_info"):  # open-ended
                    assert is_like(answer.json(), route.answer), path
                assert answer.status_code == 200


def is_like(answer: Any, example: Any) -> bool:
    """Whether the fields are the same; a field that may be null matches anything."""
    if isinstance(answer, dict) and isinstance(example, dict):
        return answer.keys() == example.keys() and all(
            name in ("sampling_params", "output") or is_like(answer[name], example[name])
            for name in answer
        )
    if isinstance(answer, list) and isinstance(example, list):
        return not example or (bool(answer) and is_like(answer[0], example[0]))
    return None in (answer, example) or type(answer) is type(example)


def test_statuses_are_those_of_the_server(document: dict[str, Any]) -> None:
    statuses = set(document["paths"]["/v1/completions"]["post"]["responses"])
    assert statuses == {"200", "400", "401", "404", "413", "415", "429", "500", "503"}
    assert "422" not in document["paths"]["/v1/models/{model_id}"]["get"]["responses"]
