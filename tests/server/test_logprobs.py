"""Log-probabilities, echo and token ids on the wire: OpenAI's two shapes, whole and streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.engine.api import CompletionOutput, Logprob
from octavo.server.reports import (
    Report,
    Tokens,
    chat_logprobs,
    completion_logprobs,
    output_tokens,
)

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine

pytestmark = pytest.mark.anyio
C, X = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
OWN = {"token": "\x07", "logprob": -3.0, "bytes": [7]}
TOP = [
    {"token": "t1", "logprob": -1.0, "bytes": [116, 49]},
    {"token": "t2", "logprob": -2.0, "bytes": [116, 50]},
]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    own = {"prompt": "abc"} if path == C else {"messages": HI}
    answer = await client.post(path, json={**own, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chunks(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    own = {"prompt": "abc"} if path == C else {"messages": HI}
    answer = await client.post(path, json={**own, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def test_a_completion_has_the_legacy_shape(client: httpx.AsyncClient) -> None:
    """B01."""
    body = await post(client, C, logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["\x07"] * 3,
        "token_logprobs": [-3.0] * 3,
        "top_logprobs": [{"t1": -1.0, "t2": -2.0, "\x07": -3.0}] * 3,
        "text_offset": [0, 3, 5],
    }


async def test_a_chat_has_the_content_shape(client: httpx.AsyncClient) -> None:
    """B01."""
    body = await post(client, X, logprobs=True, top_logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "content": [{**OWN, "top_logprobs": TOP}] * 3,
        "refusal": None,
    }


async def test_zero_alternatives_are_not_off(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """B10."""
    legacy = (await post(client, C, logprobs=0, max_tokens=2))["choices"][0]["logprobs"]
    assert legacy["token_logprobs"] == [-3.0] * 2
    assert legacy["top_logprobs"] == [{"\x07": -3.0}] * 2
    for zero in ({}, {"top_logprobs": 0}):
        chat = await post(client, X, logprobs=True, max_tokens=2, **zero)
        assert chat["choices"][0]["logprobs"]["content"] == [{**OWN, "top_logprobs": []}] * 2
    assert [request.sampling.logprobs for request in engine.requests] == [0, 0, 0]


async def test_values_that_ask_for_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path, fields in (
        (C, {"logprobs": False, "echo": False, "top_logprobs": 0}),
        (C, {"logprobs": None, "prompt_logprobs": None, "return_token_ids": False}),
        (X, {"logprobs": False, "top_logprobs": 0, "echo": False}),
        (X, {"top_logprobs": None, "return_tokens_as_token_ids": None}),
    ):
        choice = (await post(client, path, **fields))["choices"][0]
        assert choice["logprobs"] is None
        assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & set(choice)
    for request in engine.requests:
        assert request.sampling.logprobs is request.sampling.prompt_logprobs is None
        assert not request.echo
        assert not request.aligns_tokens


@pytest.mark.parametrize("as_ids", [False, True])
async def test_streams_joined_are_the_whole(client: httpx.AsyncClient, as_ids: bool) -> None:
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": as_ids}
    whole = (await post(client, C, logprobs=1, **fields))["choices"][0]
    parts = [c["choices"][0] for c in await chunks(client, C, logprobs=1, **fields)]
    first, *rest = parts
    assert (first["text"], first["logprobs"], first["token_ids"]) == ("", None, [])
    assert first["prompt_token_ids"] == whole["prompt_token_ids"] == [97, 98, 99]
    assert all("prompt_token_ids" not in part for part in rest)
    for name, values in whole["logprobs"].items():
        assert [value for part in rest for value in part["logprobs"][name]] == values
    assert whole["logprobs"]["tokens"] == (["token_id:7"] if as_ids else ["\x07"]) * 3
    assert [i for part in rest for i in part["token_ids"]] == whole["token_ids"] == [7, 7, 7]

    chat_fields = {"logprobs": True, "top_logprobs": 1, **fields}
    answer = await post(client, X, **chat_fields)
    whole = answer["choices"][0]
    opening, *later, last = await chunks(client, X, **chat_fields)
    assert opening["prompt_token_ids"] == answer["prompt_token_ids"] == [104, 105]
    parts = [c["choices"][0] for c in later]
    joined = [one for part in parts for one in part["logprobs"]["content"]]
    assert joined == whole["logprobs"]["content"]
    assert [i for part in parts for i in part["token_ids"]] == whole["token_ids"]
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["logprobs"] is None
    assert whole["logprobs"]["content"][0]["token"] == ("token_id:7" if as_ids else "\x07")


async def test_echo_without_output_scores_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """B05. The fake engine answers with a token all the same."""
    await client.post(C, json={"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1})
    (request,) = engine.requests
    assert request.echo
    assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (0, 1)


async def test_echo_comes_first(client: httpx.AsyncClient) -> None:
    whole = (await post(client, C, echo=True, logprobs=1))["choices"][0]
    assert whole["text"] == "abcHello 🌶\n"
    assert whole["logprobs"] == {
        "tokens": ["a", "b", "c", "\x07", "\x07", "\x07"],
        "token_logprobs": [None, *[-3.0] * 5],
        "top_logprobs": [
            None, *({"t1": -1.0, t: -3.0} for t in ("b", "c", "\x07", "\x07", "\x07")),
        ],
        "text_offset": [0, 1, 2, 3, 6, 8],
    }  # fmt: skip
    parts = [c["choices"][0] for c in await chunks(client, C, echo=True, logprobs=1)]
    assert parts[0]["text"] == "abc"
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][name]] == values
    plain = (await post(client, C, echo=True))["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (whole["text"], None)


async def test_prompt_logprobs_stand_beside_the_choice_or_the_choices(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    def shape(text: str) -> dict[str, Any]:
        return {
            "1": {"logprob": -1.0, "rank": 1, "decoded_token": "t1"},
            str(ord(text)): {"logprob": -3.0, "rank": 3, "decoded_token": text},
        }

    choice = (await post(client, C, prompt_logprobs=1))["choices"][0]
    assert choice["prompt_logprobs"] == [None, shape("b"), shape("c")]
    answer = await post(client, X, prompt_logprobs=1, max_tokens=0)
    assert answer["prompt_logprobs"] == [None, shape("i")]
    assert "prompt_logprobs" not in answer["choices"][0]
    more = (await post(client, C, prompt_logprobs=1, echo=True, logprobs=2))["choices"][0]
    assert more["prompt_logprobs"] == [None, shape("b"), shape("c")]
    assert [len(top or ()) for top in more["logprobs"]["top_logprobs"]] == [0, 3, 3, 3, 3, 3]
    assert engine.requests[-1].sampling.prompt_logprobs == 2


async def test_bytes_that_are_no_characters_are_written_out() -> None:
    """B03: in the legacy shape alternatives are keys, which must not fall together."""
    entry = {
        5: Logprob(-2.0, 2, "\ufffd", b"\xf0\x9f"),
        6: Logprob(-1.0, 1, "\ufffd", b"\xb6"),
        2: Logprob(float("-inf"), 9, "<|end|>", b"<|end|>"),
    }
    tokens = Tokens([5], [entry], [0])
    legacy = completion_logprobs(tokens, Report(3))
    assert legacy is not None
    assert legacy["tokens"] == ["bytes:\\xf0\\x9f"]
    assert legacy["top_logprobs"] == [
        {"bytes:\\xb6": -1.0, "bytes:\\xf0\\x9f": -2.0, "<|end|>": -9999.0}
    ]
    chat = chat_logprobs(tokens, Report(3))
    assert chat is not None
    assert [one["bytes"] for one in chat["content"][0]["top_logprobs"]] == [
        [0xB6], [0xF0, 0x9F], list(b"<|end|>"),
    ]  # fmt: skip


@pytest.mark.parametrize("path", [C, X])
async def test_masks_and_cuts_arrive(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    fields = {"allowed_token_ids": [3, 4], "bad_words": ["x"], "truncate_prompt_tokens": -1}
    await post(client, path, **fields, truncation_side="right", add_special_tokens=True)
    await post(client, path)
    cut, plain = engine.requests
    assert (cut.sampling.allowed_token_ids, cut.sampling.bad_words) == ((3, 4), ("x",))
    assert (cut.max_prompt_tokens, cut.keeps_prompt_start) == (-1, True)
    assert cut.prompt.add_special_tokens  # type: ignore[union-attr]
    assert (plain.max_prompt_tokens, plain.keeps_prompt_start) == (None, False)
    assert plain.prompt.add_special_tokens is (path == C)  # type: ignore[union-attr]


async def test_tokens_of_a_cut_stop_string_are_left_out() -> None:
    """B08: the rule for text that is cut."""
    entries = [{i: Logprob(-1.0 * i)} for i in (1, 2, 3)]
    output = CompletionOutput(0, "ab", [1, 2, 3], logprobs=entries)
    output.text_offsets, output.num_cut_tokens = [0, 1, 2], 2
    tokens = output_tokens(output, 10)
    assert tokens is not None
    assert (tokens.ids, tokens.offsets) == ([1], [10])
    assert tokens.entries == entries[:1]
    output.num_cut_tokens = 3
    assert output_tokens(output, 10) is None
