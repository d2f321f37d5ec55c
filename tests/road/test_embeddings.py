"""Embeddings over HTTP with the embedded model, against transformers in float32: alone and in all company."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest

from octavo.engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]
E, C = "/v1/embeddings", "/v1/completions"


@pytest.fixture(scope="module")
def exact(model_path: Path, start_server: Callable[..., Any]) -> Iterator[Any]:
    """A server in float32, whose prompts of more than 24 tokens are computed in chunks."""
    flags = ("--dtype", "float32", "--check-invariants", "--max-num-batched-tokens", "24")
    with start_server(*flags, "--max-num-seqs", "8") as running:
        yield running


@pytest.fixture(scope="module")
def post(exact: Any) -> Callable[..., Any]:
    def post(path: str = E, **body: Any) -> Any:
        answer = httpx.post(exact.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


@pytest.fixture(scope="module")
def wanted(oracle: Any) -> Callable[..., Any]:
    """``(token ids, kind, dimensions)`` → the embedding made of transformers' last hidden states."""
    import torch

    def embedding(token_ids: list[int], kind: str = "last", dimensions: int | None = None) -> Any:
        with torch.inference_mode():
            states = oracle.model(torch.tensor([token_ids])).last_hidden_state[0].double()
        vector = (states[-1] if kind == "last" else states.mean(dim=0))[:dimensions]
        return (vector / vector.norm()).numpy()

    return embedding


def vectors(answer: Any) -> list[Any]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [np.array(one["embedding"]) for one in answer["data"]]


def check(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-3
    assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)
    assert found @ expected > 1 - 1e-4


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_alone_together_and_beside_generation(
    exact: Any, post: Any, wanted: Any, prompts: list[list[int]], kind: str
) -> None:
    expected = [wanted(prompt, kind) for prompt in prompts]
    together = vectors(post(input=prompts, pooling_type=kind))
    for found, one in zip(together, expected, strict=True):
        check(found, one)
    plain = post(C, prompt=prompts[3], max_tokens=40, temperature=0, ignore_eos=True)["choices"]

    def generate(_i: int) -> Any:
        body = {"prompt": prompts[3], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        return post(C, **body)["choices"]

    def embed(i: int) -> Any:
        return vectors(post(input=prompts[i], pooling_type=kind))[0]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        generated = pool.map(generate, range(3))
        embedded = list(pool.map(embed, range(len(prompts))))
        assert list(generated) == [plain] * 3
    assert [one.tolist() for one in embedded] == [one.tolist() for one in together]
    exact.wait_idle()


def test_forms_of_the_answer(
    post: Any, wanted: Any, prompts: list[list[int]], tokenizer: Tokenizer
) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    ids = tokenizer.encode(text)
    answer = post(input=text)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == len(ids)
    (whole,) = vectors(answer)
    assert len(whole) == 576
    forms: list[Any] = [ids, [ids], [text]]
    for form in forms:
        (same,) = vectors(post(input=form))
        assert same.tolist() == whole.tolist()
    for kind in ("last", "mean"):
        for dimensions in (1, 64, 576):
            (cut,) = vectors(post(input=text, dimensions=dimensions, pooling_type=kind))
            check(cut, wanted(ids, kind, dimensions))
    for given in (text, prompts[:3]):
        floats = post(input=given, pooling_type="mean")
        packed = post(input=given, pooling_type="mean", encoding_format="base64")
        for one, other in zip(floats["data"], packed["data"], strict=True):
            raw = base64.b64decode(other["embedding"], validate=True)
            assert list(struct.unpack("<576f", raw)) == one["embedding"]
    (raw,) = vectors(post(input=text, normalize=False))
    assert np.linalg.norm(raw) > 10
    assert np.allclose(raw / np.linalg.norm(raw), whole, atol=1e-6)
    (cut,) = vectors(post(input=text, truncate_prompt_tokens=4))
    check(cut, wanted(ids[-4:]))
    (cut,) = vectors(post(input=text, truncate_prompt_tokens=4, truncation_side="right"))
    check(cut, wanted(ids[:4]))


def test_cached_prefixes_are_used_for_last_tokens_only(
    exact: Any, post: Any, wanted: Any, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("One two three, four five six. " * 20)[:96]
    for kind, num_cached in (("mean", 0), ("last", 95), ("mean", 0), ("last", 95)):
        answer = post(input=ids, pooling_type=kind)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
        check(vectors(answer)[0], wanted(ids, kind))
    exact.wait_idle()


def test_the_openai_sdk(exact: Any, post: Any, prompts: list[list[int]]) -> None:
    """Its default is base64."""
    with openai.OpenAI(base_url=f"{exact.url}/v1", api_key="none", max_retries=0) as sdk:
        texts = ["The quick brown fox", "To be, or not to be"]
        default = sdk.embeddings.create(model="", input=texts)
        floats = sdk.embeddings.create(model="", input=texts, encoding_format="float")
        short = sdk.embeddings.create(model="", input=prompts[:2], dimensions=32)
        for field, value in (("dimensions", 577), ("dimensions", 0), ("input", "")):
            with pytest.raises(openai.BadRequestError) as refusal:
                sdk.embeddings.create(**{"model": "", "input": "a", field: value})  # type: ignore[arg-type]
            assert refusal.value.param == field
    assert [one.embedding for one in default.data] == [one.embedding for one in floats.data]
    assert [one.embedding for one in default.data] == [
        one.tolist() for one in vectors(post(input=texts))
    ]
    assert [len(one.embedding) for one in short.data] == [32, 32]
    assert default.usage.prompt_tokens == default.usage.total_tokens > 0


def test_refusals_of_the_engine(exact: Any) -> None:
    for body, param, why in (
        ({"input": [5] * 8193}, "input", "maximum context length is 8192 tokens"),
        ({"input": "a" * 1_000_000}, "input", "cannot hold more"),
        ({"input": [[5], [49152]]}, "input", "not in the vocabulary"),
        ({"input": "a", "dimensions": 577}, "dimensions", "1 to 576"),
        ({"input": "a", "truncate_prompt_tokens": 8193}, "truncate_prompt_tokens", "1 to 8192"),
        ({"input": "a", "cache_salt": "@"}, "cache_salt", "must not hold"),
    ):
        answer = httpx.post(exact.url + E, json=body, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert why in answer.json()["error"]["message"]


def test_a_client_that_goes_away_takes_all_inputs_with_it(exact: Any) -> None:
    body = json.dumps({"input": [[i % 40000] * 60 for i in range(2048)]}).encode()
    before = exact.metric("vllm:prompt_tokens_total")
    parts = urlsplit(exact.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {E} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not exact.metric("vllm:num_requests_running"):
            pass
    exact.wait_idle(60)
    assert exact.metric("vllm:prompt_tokens_total") - before < 2048 * 60
    assert exact.metric("octavo:kv_blocks_used") == 0


def test_many_inputs_in_one_request(exact: Any, post: Any) -> None:
    ids = [[i % 40000 + 1] for i in range(2048)]
    answer = post(input=ids, encoding_format="base64")
    assert answer["usage"]["total_tokens"] == 2048
    assert [one["index"] for one in answer["data"]] == list(range(2048))
    for i in (0, 7, 1024, 2047):
        (alone,) = post(input=ids[i], encoding_format="base64")["data"]
        assert answer["data"][i]["embedding"] == alone["embedding"]
    exact.wait_idle()
