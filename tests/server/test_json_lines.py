"""An event is one line to clients that know more line ends than server-sent events do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.json_lines import encode_line

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio

ENDS = ["\u2028", "\u2029", "\x85", "\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]
PIECES = ["a\u2028b", "“\u2029”", "c\x85", "d\x0b\x1c\r\n"]


@given(
    st.lists(st.sampled_from([*ENDS, "a", "é", "\u2013", "Â", "\u0385", "🌶", '"', "\\"])).map(
        "".join
    )
)
def test_any_text_is_one_line_and_itself(text: str) -> None:
    line = encode_line({"text": text}).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {"text": text}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "logprobs": 1, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_a_stream_can_be_cut_into_lines_as_python_does(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.pieces = PIECES
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert response.status_code == 200
    for line in lines:
        kind, _, data = line.partition(": ")
        assert kind in ("data", "event")
        if kind == "data" and data != "[DONE]":
            json.loads(data)
    told = "".join(lines)
    for escaped in ("\\u2028", "\\u2029", "\\u0085", "\\u000b"):
        assert escaped in told
