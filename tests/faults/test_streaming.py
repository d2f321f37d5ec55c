"""Known faults A: what a stream says is what the whole answer says, character by character."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import openai
import pytest

from octavo.engine.text.detokenizer import Detokenizer
from octavo.engine.text.gguf_tokenizer import TokenType, build_gguf_tokenizer
from octavo.engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]
C, X = "/v1/completions", "/v1/chat/completions"
PEPPER = [10813, 230, 131]  # the three tokens of 🌶
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def texts(chunks: list[Any], index: int = 0) -> list[str]:
    parts = [p for c in chunks for p in c["choices"] if p["index"] == index]
    return [p["text"] if "text" in p else p["delta"].get("content") or "" for p in parts]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (C, {"prompt": "🌶🌶🌶🌶🌶🌶🌶🌶", "max_tokens": 12}),
        (
            X,
            {
                "messages": [{"role": "user", "content": "Repeat exactly: 你好，龜 가 🫠"}],  # noqa: RUF001
                "max_tokens": 24,
            },
        ),
        (X, {"allowed_token_ids": PEPPER, "max_tokens": 9, "logit_bias": {"10813": 3}}),
    ],
)
def test_a01_characters_of_several_tokens_arrive_whole(
    exact: Any, path: str, fields: dict[str, Any]
) -> None:
    whole, chunks = exact.parity(path, **fields)
    joined = "".join(texts(chunks))
    if "allowed_token_ids" not in fields:
        assert "\ufffd" not in joined
    if path == C:
        assert "🌶🌶" in joined
    for delta in texts(chunks):
        assert delta.count("\ufffd") <= joined.count("\ufffd")
    assert whole["usage"]["completion_tokens"] <= fields["max_tokens"]


def test_a01_tokens_pushed_one_by_one(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in PEPPER] == ["", "", "🌶"]
    assert detokenizer.finish() == ""


def test_a03_bytes_left_over_at_the_end_are_those_of_a_full_decode(exact: Any) -> None:
    fields = {"prompt": "x", "logit_bias": {"10813": 100}, "max_tokens": 3}
    whole, chunks = exact.parity(C, **fields)  # whose stream is strict UTF-8
    expected = (b"\xf0\x9f" * 3).decode("utf-8", "replace")
    assert whole["choices"][0]["text"] == "".join(texts(chunks)) == expected
    assert whole["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", [C, X])
def test_a05_text_held_for_a_stop_string_comes_out_at_the_end(exact: Any, path: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    reference, _ = exact.parity(path, **fields)
    text = "".join(texts([{"choices": [as_part(reference["choices"][0])]}]))
    assert reference["choices"][0]["finish_reason"] == "length"
    held = text[-3:]
    whole, chunks = exact.parity(path, **fields, stop=[held + "\u241fnever"])
    choice = whole["choices"][0]
    assert as_part(choice)["delta"]["content"] == text
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    last_with_text = [i for i, delta in enumerate(texts(chunks)) if delta][-1]
    assert texts(chunks)[last_with_text].endswith(held)
    ends = [i for i, c in enumerate(chunks) if c["choices"][0]["finish_reason"]]
    assert last_with_text <= ends[0] == len(chunks) - 1


def as_part(choice: Any) -> Any:
    content = choice["text"] if "text" in choice else choice["message"]["content"]
    return {"index": 0, "delta": {"content": content}}


def test_a07_a_stop_string_that_is_a_special_token_stops_and_stays_hidden(exact: Any) -> None:
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 64}
    plain, _ = exact.parity(X, **ask)
    stopped, _ = exact.parity(X, **ask, stop=["<|im_end|>"], ignore_eos=True)
    for answer in (plain, stopped):
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 64
        content = answer["choices"][0]["message"]["content"]
        assert content
        assert not any(special in content for special in SPECIALS)
    assert stopped["choices"][0]["message"] == plain["choices"][0]["message"]
    assert stopped["choices"][0]["stop_reason"] == "<|im_end|>"


def test_a09_usage_is_one_chunk_before_the_end(exact: Any) -> None:
    ask: dict[str, Any] = {"max_tokens": 5}
    for path in (C, X):
        whole = exact.ask(path, **ask)
        *chunks, last = exact.stream(path, **ask, stream_options={"include_usage": True})
        assert last["choices"] == []
        assert {k: v for k, v in last["usage"].items() if isinstance(v, int)} == {
            k: v for k, v in whole["usage"].items() if isinstance(v, int)
        }
        usage = last["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert all(c["choices"] and c.get("usage") is None for c in chunks)
        for name in ("id", "model", "created", "object"):
            assert len({c[name] for c in (*chunks, last)}) == 1
            assert last[name]
        for options in ({}, {"include_usage": False}, None):
            plain = exact.stream(path, **ask, stream_options=options)
            assert all(c["choices"] and c.get("usage") is None for c in plain)
        for stream in ({"stream": False}, {}):
            refused = exact.send(path, **ask, **stream, stream_options={"include_usage": True})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "stream_options"


def test_a09_the_sdk_reads_the_usage(exact: Any) -> None:
    with openai.OpenAI(base_url=f"{exact.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="smol",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert [bool(c.usage) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 5


def test_a12_a_stream_that_waits_says_so(single: Any) -> None:
    first = single.connect(C, prompt="Count:", max_tokens=4000, ignore_eos=True)
    first.read_until(b"data: ", 2)
    second = single.connect(C, prompt="Hello world", max_tokens=2)
    waiting = second.read_until(b": keep-alive\n\n", 4)  # while the seat is taken
    head, _, sent = waiting.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"data:" not in sent
    assert single.metric("vllm:num_requests_waiting") == 1
    refused = single.send(C, stream=True, prompt="")  # beside it
    assert refused.status_code == 400
    first.close()
    events = dechunked(second.read_until(b"[DONE]")).split(b"\n\n")
    second.close()
    for event in events:  # whole events or whole comments
        assert event.startswith((b"data: ", b": keep-alive")) or not event
        assert b"\n" not in event
    told = [json.loads(e.removeprefix(b"data: ")) for e in events if e.startswith(b"data: {")]
    assert "".join(texts(told)) == single.text(prompt="Hello world", max_tokens=2)
    single.wait_idle()


def dechunked(received: bytes) -> bytes:
    """The body of a chunked answer, as far as it was received."""
    body, rest = b"", received.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size or b"0", 16)
        body, rest = body + rest[:count], rest[count + 2 :]
    return body


def test_a12_clients_pass_over_comments_and_without_the_flag_there_are_none(
    single: Any, exact: Any
) -> None:
    first = single.connect(C, prompt="Count:", max_tokens=60, ignore_eos=True)
    first.read_until(b"data: ")
    with openai.OpenAI(base_url=f"{single.url}/v1", api_key=single.key, max_retries=0) as client:
        stream = client.completions.create(
            model="", prompt="Hello world", max_tokens=4, temperature=0, stream=True
        )
        text = "".join(c.choices[0].text for c in stream)
    first.close()
    assert text == single.text(prompt="Hello world", max_tokens=4)
    single.wait_idle()
    blockers = [exact.connect(C, prompt="x", max_tokens=4000, ignore_eos=True) for _ in range(8)]
    for one in blockers:
        one.read_until(b"data: ")
    silent = exact.connect(C, prompt="Hello world", max_tokens=1)
    exact.wait_for("vllm:num_requests_waiting", 1)
    for one in blockers:
        one.close()
    assert b"keep-alive\n\n" not in silent.read_until(b"[DONE]")
    silent.close()
    exact.audit()


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """A vocabulary in SentencePiece's way: spaces are part of words, bytes are tokens."""
    words = ["▁", "▁the", "▁sea", "t", "h", "e", "s", "a", "▁▁", "he", ".", "▁.", "é", "你", "th"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * len(words)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0 - i for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Tokenizer(build_gguf_tokenizer(metadata, "tiny.gguf"), bos_token="<s>")


@pytest.mark.parametrize("kind", ["tokenizer", "metaspace"])
def test_a13_deltas_joined_are_the_text_of_all_ids(
    request: pytest.FixtureRequest, kind: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng = random.Random(13)
    last = min(tokenizer.vocab_size, 49152) - 1
    rare = [*range(3), *range(3, 259)] if kind == "metaspace" else [*range(17), *PEPPER]
    for _ in range(500):
        ids = [
            rng.choice(rare) if rng.random() < 0.3 else rng.randint(0, last)
            for _ in range(rng.randint(1, 40))
        ]
        skips = rng.random() < 0.5
        detokenizer, deltas, position = Detokenizer(tokenizer, skip_special_tokens=skips), [], 0
        while position < len(ids):
            step = rng.choice((1, 1, 2, 8))
            deltas.append(detokenizer.push(ids[position : position + step]))
            position += step
        deltas.append(detokenizer.finish())
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skips)


def test_a13_spaces_survive_the_borders_of_tokens(metaspace: Tokenizer) -> None:
    words = metaspace.encode("the sea. the sea", add_special_tokens=False)
    detokenizer = Detokenizer(metaspace)
    deltas = [detokenizer.push([token_id]) for token_id in words] + [detokenizer.finish()]
    assert "".join(deltas) == "the sea. the sea"
    goes_on = Detokenizer(metaspace, keep_leading_space=True)
    assert "".join(goes_on.push([i]) for i in words) + goes_on.finish() == " the sea. the sea"


def test_a13_a_stream_is_the_text_of_its_ids(exact: Any, tokenizer: Tokenizer) -> None:
    fields = {"prompt": "Once upon a time. There", "max_tokens": 60, "return_token_ids": True}
    whole, chunks = exact.parity(C, **fields)
    ids = [i for c in chunks for i in c["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert "".join(texts(chunks)) == tokenizer.decode(ids)


def test_a15_choices_of_a_stream_are_told_apart(exact: Any) -> None:
    ask: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Pick a word"}],
        "n": 3, "temperature": 1, "seed": 1, "max_tokens": 8,
    }  # fmt: skip
    whole = exact.ask(X, **ask)
    chunks = exact.stream(X, **ask)
    assert {p["index"] for c in chunks for p in c["choices"]} == {0, 1, 2}
    assert len({choice["message"]["content"] for choice in whole["choices"]}) > 1
    for index, choice in enumerate(whole["choices"]):
        parts = [p for c in chunks for p in c["choices"] if p["index"] == index]
        assert [p["delta"].get("role") for p in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert [bool(p["finish_reason"]) for p in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert "".join(texts(chunks, index)) == choice["message"]["content"]
    for choice in [p["delta"] for c in chunks for p in c["choices"]] + [
        c["message"] for c in whole["choices"]
    ]:
        assert not {"tool_calls", "function_call"} & set(choice)


@pytest.mark.parametrize("path", [C, X])
def test_a15_seeded_choices_of_several_prompts_say_the_same_streamed_and_whole(
    exact: Any, path: str
) -> None:
    fields: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 7, "max_tokens": 6}
    prompts = {"prompt": ["Once upon a time", "1, 2, 3,"]} if path == C else {}
    whole, _ = exact.parity(path, **fields, **prompts, logprobs=True if path == X else 1)
    assert [choice["index"] for choice in whole["choices"]] == [*range(4 if path == C else 2)]
    assert whole["usage"]["completion_tokens"] == sum(
        len(c["logprobs"]["tokens" if path == C else "content"]) for c in whole["choices"]
    )


def test_a_stream_that_is_refused_is_no_stream(single: Any) -> None:
    """Of the kind of A12: comments do not hide a refusal, keyed or not."""
    answer = httpx.post(single.url + C, json={"prompt": "x", "stream": True}, timeout=30)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/json"
