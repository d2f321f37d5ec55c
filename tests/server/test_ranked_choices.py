"""Beams and best_of over HTTP: translation, shape, usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abcd"}),
    ("/v1/chat/completions", {"messages": HI}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_fields_arrive(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    fields = {
        "n": 2,
        "best_of": 4,
        "use_beam_search": True,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "min_tokens": 1,
        "presence_penalty": 1.5,
    }
    answer = await client.post(path, json={**body, **fields, "cache_salt": "tenant"})
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in fields} == fields
    assert request.cache_salt == "tenant"


@pytest.mark.parametrize("value", [True, False, "never", None])
async def test_values_of_early_stopping(
    client: httpx.AsyncClient, engine: FakeEngine, value: bool | str | None
) -> None:
    body = {"prompt": "a", "use_beam_search": True, "early_stopping": value}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert engine.requests[0].sampling.early_stopping == (value or False)


async def test_model_defaults_for_drawing_do_not_reach_a_beam_search(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.default_sampling = {
        "temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2,
    }  # fmt: skip
    body = {"prompt": "x", "n": 2, "use_beam_search": True}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    await client.post("/v1/completions", json={**body, "use_beam_search": False})
    beams, drawn = (request.sampling for request in engine.requests)
    assert (beams.temperature, beams.top_p, beams.top_k, beams.min_p) == (1.0, 1.0, 0, 0.0)
    assert beams.repetition_penalty == drawn.repetition_penalty == 1.2
    assert drawn.temperature == 0.3


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("fields", [{"use_beam_search": True}, {"best_of": 5}])
async def test_each_choice_says_how_likely_it_is(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    answer = (await client.post(path, json={**body, "n": 2, **fields})).json()
    assert [choice["cumulative_logprob"] for choice in answer["choices"]] == [-1.5, -2.5]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


async def test_other_choices_do_not(client: httpx.AsyncClient) -> None:
    for fields in ({}, {"n": 1, "best_of": 1}):
        answer = await client.post("/v1/completions", json={"prompt": "a", **fields})
        assert "cumulative_logprob" not in answer.json()["choices"][0]


async def test_usage_counts_what_was_drawn_and_what_was_cached_over_all_prompts(
    client: httpx.AsyncClient,
) -> None:
    body = {"prompt": ["abcd", "ab"], "n": 2, "best_of": 5, "max_tokens": 3}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 2 * 5 * 3,
        "total_tokens": 36,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
