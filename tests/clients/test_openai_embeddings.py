"""The official Python SDK: embeddings, where the server has them."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

ROUTE = "/v1/embeddings"
pytestmark = pytest.mark.usefixtures("needs_route")
TEXTS = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose again."]
WIDTH = 576  # of the embedded model


def _vectors(client: openai.OpenAI, given: Any, **more: Any) -> list[list[float]]:
    answer = client.embeddings.create(model="smol", input=given, **more)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [one.embedding for one in answer.data]


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_one_vector_of_length_1_for_each_text(client: openai.OpenAI) -> None:
    vectors = _vectors(client, TEXTS)  # the SDK asks for base64
    assert [len(vector) for vector in vectors] == [WIDTH] * 3
    assert all(math.isclose(_dot(vector, vector), 1, abs_tol=1e-4) for vector in vectors)
    near, far = _dot(vectors[0], vectors[1]), _dot(vectors[0], vectors[2])
    assert near > far


def test_both_formats_say_the_same(client: openai.OpenAI) -> None:
    coded: list[Any] = [*_vectors(client, TEXTS[0], encoding_format="base64")]
    plain = _vectors(client, TEXTS[0], encoding_format="float")
    if isinstance(coded[0], str):  # some versions of the SDK decode only what they asked for
        import array
        import base64

        coded = [list(array.array("f", base64.b64decode(coded[0])))]
    assert max(abs(a - b) for a, b in zip(coded[0], plain[0], strict=True)) < 1e-6


def test_texts_are_embedded_alike_alone_and_together(client: openai.OpenAI) -> None:
    together = _vectors(client, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        (alone,) = _vectors(client, text)
        assert max(abs(a - b) for a, b in zip(alone, vector, strict=True)) < 1e-4


def test_token_ids(client: openai.OpenAI) -> None:
    tokens = client.post("../tokenize", body={"prompt": TEXTS[0]}, cast_to=dict[str, Any])["tokens"]
    (by_text,), (by_ids,) = _vectors(client, TEXTS[0]), _vectors(client, [tokens])
    assert max(abs(a - b) for a, b in zip(by_text, by_ids, strict=True)) < 1e-4


def test_fewer_dimensions_are_the_first_normalised_again(client: openai.OpenAI) -> None:
    (whole,), (cut,) = _vectors(client, TEXTS[0]), _vectors(client, TEXTS[0], dimensions=64)
    length = math.sqrt(_dot(whole[:64], whole[:64]))
    assert len(cut) == 64
    assert max(abs(a / length - b) for a, b in zip(whole[:64], cut, strict=True)) < 1e-4


def test_usage(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="smol", input=TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 10


def test_refusals(client: openai.OpenAI) -> None:
    wrong: list[dict[str, Any]] = [
        {"dimensions": 0},
        {"dimensions": WIDTH + 1},
        {"input": ""},
        {"input": []},
    ]
    for fields in wrong:
        given: Any = {"model": "smol", "input": "a", **fields}
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(**given)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="no-such", input="a")
