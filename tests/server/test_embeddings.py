"""``POST /v1/embeddings``: forms of input and answer, refusals by name, the SDK, clients that go away."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from octavo.engine.api import PoolingParams, TextPrompt, TokensPrompt
from octavo.engine.config.server_config import ServerConfig
from octavo.engine.errors import OverloadedError
from octavo.server.app import create_app
from octavo.server.fields import NOT_SUPPORTED

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
E = "/v1/embeddings"


def vector(*token_ids: int) -> list[float]:
    """The fake engine's, as float32 holds it."""
    numbers = (token_ids[-1] / 7, sum(token_ids) / len(token_ids), 0.1, -1e-30)
    return list(struct.unpack("<4f", struct.pack("<4f", *numbers)))


async def post(client: httpx.AsyncClient, **body: Any) -> Any:
    answer = await client.post(E, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_whole_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(E, json={"input": ["ab", "c"]}, headers={"X-Request-Id": "mine"})
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    created = answer.pop("created")
    assert isinstance(created, int)
    assert answer == {
        "id": "embd-mine",
        "object": "list",
        "model": "tiny",
        "data": [
            {"index": 0, "object": "embedding", "embedding": vector(97, 98)},
            {"index": 1, "object": "embedding", "embedding": vector(99)},
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 6},
        },
    }
    assert [request.pooling for request in engine.requests] == [PoolingParams()] * 2
    assert [request.sampling.max_tokens for request in engine.requests] == [0, 0]
    assert len({request.request_id for request in engine.requests}) == 2


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [TextPrompt("ab")]),
        (["ab"], [TextPrompt("ab")]),
        (["ab", "c"], [TextPrompt("ab"), TextPrompt("c")]),
        ([5, 6], [TokensPrompt([5, 6])]),
        ([[5, 6], [7]], [TokensPrompt([5, 6]), TokensPrompt([7])]),
    ],
)
async def test_forms_of_input(
    client: httpx.AsyncClient, engine: FakeEngine, given: Any, prompts: list[Any]
) -> None:
    answer = await post(client, input=given)
    assert [request.prompt for request in engine.requests] == prompts
    assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))


async def test_base64_is_the_float_answer(client: httpx.AsyncClient) -> None:
    for given in ("ab", [[5, 6], [7]]):
        floats = await post(client, input=given, encoding_format="float")
        packed = await post(client, input=given, encoding_format="base64")
        for one, other in zip(floats["data"], packed["data"], strict=True):
            raw = base64.b64decode(other["embedding"], validate=True)
            assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == one["embedding"]
        assert packed["usage"] == floats["usage"]


@pytest.mark.parametrize(
    ("fields", "pooling"),
    [
        ({}, PoolingParams()),
        ({"dimensions": 3}, PoolingParams(dimensions=3)),
        ({"pooling_type": "mean"}, PoolingParams("mean")),
        ({"normalize": False}, PoolingParams(normalize=False)),
        ({"use_activation": False}, PoolingParams(normalize=False)),
        ({"use_activation": True, "normalize": True}, PoolingParams()),
        ({"encoding_format": None, "dimensions": None, "normalize": None}, PoolingParams()),
        ({"user": "me", "stream": False, "embed_dtype": "float32"}, PoolingParams()),
    ],
)
async def test_what_is_wanted_of_the_vector(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], pooling: PoolingParams
) -> None:
    answer = await post(client, input="ab", **fields)
    assert engine.requests[0].pooling == pooling
    assert answer["data"][0]["embedding"] == vector(97, 98)[: pooling.dimensions]


async def test_fields_of_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(
        client,
        input="ab",
        add_special_tokens=False,
        truncate_prompt_tokens=5,
        truncation_side="right",
        cache_salt="s",
    )
    await post(client, input="ab", truncate_prompt_tokens=-1)
    first, second = engine.requests
    assert first.prompt == TextPrompt("ab", add_special_tokens=False)
    assert (first.max_prompt_tokens, first.keeps_prompt_start, first.cache_salt) == (5, True, "s")
    assert (second.max_prompt_tokens, second.keeps_prompt_start) == (-1, False)


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"input": None}, 400, "input"),
    ({"input": ""}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": ["a", ""]}, 400, "input"),
    ({"input": [[]]}, 400, "input"),
    ({"input": ["a", 1]}, 400, "input"),
    ({"input": [True]}, 400, "input"),
    ({"input": [1.5]}, 400, "input"),
    ({"input": 7}, 400, "input"),
    ({"input": ["a"] * 2049}, 400, "input"),
    ({"dimensions": 0}, 400, "dimensions"),
    ({"dimensions": -3}, 400, "dimensions"),
    ({"dimensions": 2.0}, 400, "dimensions"),
    ({"dimensions": True}, 400, "dimensions"),
    ({"encoding_format": "hex"}, 400, "encoding_format"),
    ({"encoding_format": "bytes"}, 400, "encoding_format"),
    ({"encoding_format": 1}, 400, "encoding_format"),
    ({"pooling_type": "cls"}, 400, "pooling_type"),
    ({"normalize": "yes"}, 400, "normalize"),
    ({"normalize": True, "use_activation": False}, 400, "use_activation"),
    ({"stream": True}, 400, "stream"),
    ({"stream_options": {}}, 400, "stream_options"),
    ({"messages": [{"role": "user", "content": "a"}]}, 400, "messages"),
    ({"embed_dtype": "float16"}, 400, "embed_dtype"),
    ({"endianness": "big"}, 400, "endianness"),
    ({"padding": True}, 400, "padding"),
    ({"truncation_side": "middle"}, 400, "truncation_side"),
    ({"truncate_prompt_tokens": "5"}, 400, "truncate_prompt_tokens"),
    ({"model": "other"}, 404, "model"),
]


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED)
async def test_wrong_fields_are_refused_by_name(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    fields: dict[str, Any],
    status: int,
    param: str | None,
) -> None:
    answer = await client.post(E, json={"input": "a", **fields})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert str(param) in error["message"] or param == "model"
    assert engine.requests == []


async def test_no_more_than_2048_inputs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, input=["a"] * 2048, encoding_format="base64")
    assert len(answer["data"]) == len(engine.requests) == 2048


@pytest.mark.parametrize("name", ["tools", "prompt_embeds"])
async def test_what_no_route_offers(client: httpx.AsyncClient, name: str) -> None:
    assert name in NOT_SUPPORTED
    answer = await client.post(E, json={"input": "a", name: 7})
    assert answer.json()["error"]["code"] == "unsupported_parameter"


async def test_priorities(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, input="a", priority=3)
    await client.post(E, json={"input": "a", "priority": 3}, headers={"X-Vllm-Priority": "-1"})
    assert [request.priority for request in engine.requests] == [3, -1]


async def test_behind_a_key(guarded: httpx.AsyncClient) -> None:
    assert (await guarded.post(E, json={"input": "a"})).status_code == 401
    key = {"Authorization": "Bearer first"}
    assert (await guarded.post(E, json={"input": "a"}, headers=key)).status_code == 200


async def test_failures(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.error = "the model's hidden states are not finite"
    answer = await client.post(E, json={"input": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, engine.error)
    assert all(stream.is_aborted for stream in engine.streams)
    engine.error, engine.is_closed = None, True
    answer = await client.post(E, json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
    engine.die("killed")
    answer = await client.post(E, json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


async def test_an_engine_that_is_full(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_requests: Any) -> Any:
        raise OverloadedError("Too much is queued.", reason="max_num_queued_reqs")

    monkeypatch.setattr(engine, "submit", refuse)
    answer = await client.post(E, json={"input": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


async def test_a_client_that_goes_away_takes_all_inputs_with_it(engine: FakeEngine) -> None:
    engine.hold_at = 0
    sent: list[Any] = []
    inbox: list[Any] = [
        {"type": "http.request", "body": json.dumps({"input": ["a", "b", "c"]}).encode()}
    ]

    async def receive() -> Any:
        return inbox.pop() if inbox else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": E,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    async with asyncio.timeout(5):
        await create_app(engine, ServerConfig(), ("tiny",))(scope, receive, send)
    assert [stream.is_aborted for stream in engine.streams] == [True] * 3
    assert sent[0]["status"] == 499


async def test_other_requests_are_answered_between_inputs(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """All embeddings are there at once: encoding and sending them must not hold up the event loop."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await post(client, input=["a"] * 500)
    counting.cancel()
    assert turns > 900


async def test_the_openai_sdk(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        default = await sdk.embeddings.create(model="tiny", input=["ab", "c"])
        plain = await sdk.embeddings.create(
            model="tiny", input=["ab", "c"], encoding_format="float", user="me"
        )
        short = await sdk.embeddings.create(model="tiny", input=[5, 6], dimensions=2)
        with pytest.raises(openai.BadRequestError) as refusal:
            await sdk.embeddings.create(model="tiny", input="a", dimensions=0)
    assert [one.embedding for one in default.data] == [vector(97, 98), vector(99)]
    assert [one.embedding for one in plain.data] == [one.embedding for one in default.data]
    assert short.data[0].embedding == vector(5, 6)[:2]
    assert (default.usage.prompt_tokens, default.usage.total_tokens) == (3, 3)
    assert refusal.value.param == "dimensions"
