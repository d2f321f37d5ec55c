"""Tokenising and rendering without generating."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.config.server_config import ServerConfig
from octavo.server.app import create_app
from octavo.server.routes_tokens import MAX_CHARS, MAX_TOKENS

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]


async def test_a_text_and_back(client: httpx.AsyncClient) -> None:
    answer = await client.post("/tokenize", json={"prompt": "AB"})
    expected = {"count": 2, "max_model_len": 64, "tokens": [65, 66], "token_strs": None}
    assert answer.json() == expected
    back = await client.post("/detokenize", json={"model": "tiny", "tokens": [65, 66]})
    assert back.json() == {"prompt": "AB"}


async def test_a_chat_with_the_vocabularys_entries(client: httpx.AsyncClient) -> None:
    body = {"messages": HI, "add_generation_prompt": False, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert (answer["tokens"], answer["token_strs"]) == ([104, 105], ["<104>", "<105>"])


async def test_a_text_may_exceed_the_window(client: httpx.AsyncClient) -> None:
    answer = await client.post("/tokenize", json={"prompt": "a" * 65})
    assert (answer.status_code, answer.json()["count"]) == (200, 65)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": "a" * (MAX_CHARS + 1)}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": "no-such"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "65"}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_TOKENS + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/v1/completions/render", {"prompt": "a", "top_p": 2}, 400, "top_p"),
        ("/v1/completions/render", {"prompt": ""}, 400, "prompt"),
        ("/v1/chat/completions/render", {"messages": []}, 400, "messages"),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_rendered_completion_is_one_object_a_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fields = {"max_tokens": 5, "temperature": 0.5, "logit_bias": {"7": 3}, "cache_salt": "s"}
    body = {"prompt": ["A", "BC"], "stream": True, **fields}
    objects = (await client.post("/v1/completions/render", json=body)).json()
    assert [one["token_ids"] for one in objects] == [[65], [66, 67]]
    for one in objects:
        assert (one["stream"], one["cache_salt"], one["model"]) == (True, "s", "tiny")
        sampling = one["sampling_params"]
        assert (sampling["max_tokens"], sampling["temperature"]) == (5, 0.5)
        assert (sampling["logit_bias"], sampling["seed"]) == ({"7": 3.0}, None)
    assert engine.requests == []  # nothing was computed


async def test_a_rendered_chat_is_one_object(client: httpx.AsyncClient) -> None:
    body = {"messages": HI, "seed": 4}
    one = (await client.post("/v1/chat/completions/render", json=body)).json()
    assert (one["token_ids"], one["sampling_params"]["seed"]) == ([104, 105], 4)


async def test_tokenizer_info_needs_its_flag(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/tokenizer_info")).status_code == 404
    app = create_app(engine, ServerConfig(enable_tokenizer_info_endpoint=True), ("tiny",))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as other:
        assert (await other.get("/tokenizer_info")).json()["tokenizer_class"] == "Fake"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions/render"])
async def test_a_server_that_loads_says_so(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    engine.is_ready = False
    answer = await client.post(path, json={"prompt": "a", "tokens": [1]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
