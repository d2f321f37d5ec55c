"""Refusals name the fields that the client sent, not those behind the routes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
TOO_MANY = {"min_tokens": 5}


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_completion_tokens": 2}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": HI, "max_completion_tokens": 2},
            "max_completion_tokens",
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}, "max_output_tokens"),
    ],
)
async def test_another_field_is_held_against_the_one_that_was_sent(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], name: str
) -> None:
    answer = await client.post(path, json={**fields, **TOO_MANY})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "min_tokens"
    assert error["message"] == f"min_tokens must be at most {name}=2, got 5."
