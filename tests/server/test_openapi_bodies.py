"""The ranges that the OpenAPI document states are those that are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app
from octavo.server.openapi_bodies import RANGES

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
PATH = {"top_logprobs": "/v1/chat/completions/render", "messages": "/v1/chat/completions/render"}
HI = {"role": "user", "content": "hi"}
WITH: dict[str, dict[str, Any]] = {
    "best_of": {"n": 1},
    "length_penalty": {"use_beam_search": True},
    "top_logprobs": {"logprobs": True},
    "max_tokens": {"echo": True},
    "max_completion_tokens": {"echo": True},
}
"""What else a field needs to be looked at, or for its least value to make sense."""


LEAST = {"top_logprobs": 0}
"""-1 is for servers with --max-logprobs -1."""


def _body(name: str, value: Any) -> dict[str, Any]:
    asked = {"messages": [HI]} if name in PATH else {"prompt": "a", "max_tokens": 4}
    return {**asked, **WITH.get(name, {}), name: value}


def _edges() -> list[tuple[str, Any, bool]]:
    """``(field, value, whether it is within)`` on both sides of every bound."""
    edges: list[tuple[str, Any, bool]] = []
    for name, keywords in RANGES.items():
        if name == "truncate_prompt_tokens":  # the engine's admission looks at it
            continue
        if "minimum" in keywords:
            least = keywords["minimum"]
            edges += [(name, LEAST.get(name, least), True), (name, least - 1, False)]
        if "exclusiveMinimum" in keywords:
            edges += [(name, 1e-3, True), (name, keywords["exclusiveMinimum"], False)]
        if "maximum" in keywords:
            edges += [(name, keywords["maximum"], True), (name, keywords["maximum"] + 1, False)]
    return edges


LISTS: list[tuple[str, Any, bool]] = [
    ("stop_token_ids", [7] * RANGES["stop_token_ids"]["maxItems"], True),
    ("stop_token_ids", [7] * (RANGES["stop_token_ids"]["maxItems"] + 1), False),
    ("allowed_token_ids", [], False),
    ("allowed_token_ids", [7], True),
    ("bad_words", ["a"] * RANGES["bad_words"]["maxItems"], True),
    ("bad_words", ["a"] * (RANGES["bad_words"]["maxItems"] + 1), False),
    ("bad_words", [" "], False),
    ("bad_words", ["a" * RANGES["bad_words"]["items"]["maxLength"]], True),
    ("bad_words", ["a" * (RANGES["bad_words"]["items"]["maxLength"] + 1)], False),
    ("logit_bias", {"07": 1}, False),
    ("logit_bias", {"7": 100.5}, False),
    ("logit_bias", {str(i): 1 for i in range(RANGES["logit_bias"]["maxProperties"])}, True),
    ("logit_bias", {str(i): 1 for i in range(RANGES["logit_bias"]["maxProperties"] + 1)}, False),
    ("messages", [], False),
    ("messages", [HI] * RANGES["messages"]["maxItems"], True),
    ("messages", [HI] * (RANGES["messages"]["maxItems"] + 1), False),
    ("messages", [{"role": "nobody", "content": "a"}], False),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], True),
    ("stop", ["a"] * 4, True),
    ("stop", ["a"] * 5, False),
    ("stop", "", False),
]


@pytest.mark.parametrize(("name", "value", "is_within"), [*_edges(), *LISTS])
async def test_a_stated_bound_is_the_one_that_is_checked(
    client: httpx.AsyncClient, name: str, value: Any, *, is_within: bool
) -> None:
    answer = await client.post(PATH.get(name, "/v1/completions/render"), json=_body(name, value))
    if is_within:
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(name)


@pytest.fixture
def schemas(engine: FakeEngine) -> dict[str, Any]:
    """The bodies of the document by path."""
    paths = create_app(engine, ServerConfig(), ("tiny",)).openapi()["paths"]
    return {
        path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, methods in paths.items()
        if "requestBody" in methods.get("post", {})
    }


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for one in value.values() for ref in _references(one)]
    return [ref for one in value for ref in _references(one)] if isinstance(value, list) else []


async def test_every_reference_is_resolved_in_the_document(engine: FakeEngine) -> None:
    document = create_app(engine, ServerConfig(), ("tiny",)).openapi()
    references = _references(document)
    assert "#/components/schemas/StreamOptions" in references
    for reference in references:
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


async def test_fields_carry_their_ranges_beside_null(schemas: dict[str, Any]) -> None:
    fields = schemas["/v1/chat/completions"]["properties"]
    assert fields["temperature"]["anyOf"] == [
        {"type": "number", "minimum": 0, "maximum": 2},
        {"type": "null"},
    ]
    assert fields["logprobs"]["anyOf"] == [{"type": "boolean"}, {"type": "null"}]
    assert fields["messages"]["minItems"] == 1


async def test_a_completion_needs_a_prompt_in_one_of_four_forms(schemas: dict[str, Any]) -> None:
    completion = schemas["/v1/completions"]
    assert completion["required"] == ["prompt"]
    assert len(completion["properties"]["prompt"]["anyOf"]) == 4
    tokenize = schemas["/tokenize"]["anyOf"][0]
    assert tokenize["properties"]["prompt"] == {"title": "Prompt", "type": "string"}
