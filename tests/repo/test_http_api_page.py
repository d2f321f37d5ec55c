"""docs/http-api.md names every field that the server knows, under the right heading."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.server.embeddings import EmbeddingRequest
from octavo.server.errors import _CODES, _TYPES
from octavo.server.fields import NO_EFFECT, NOT_SUPPORTED
from octavo.server.responses_request import KNOWN
from octavo.server.routes_embeddings import _NEUTRAL
from octavo.server.schemas import ChatCompletionRequest, CompletionRequest


@pytest.fixture(scope="module")
def sections(root: Path) -> dict[str, str]:
    """Text below each second-level heading."""
    page = (root / "docs" / "http-api.md").read_text()
    return {
        title: text for title, _, text in (part.partition("\n") for part in page.split("\n## ")[1:])
    }


def test_every_used_field_is_described(sections: dict[str, str]) -> None:
    text = sections["Fields of both generation routes"]
    used = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert [name for name in sorted(used) if f"`{name}`" not in text] == []


def test_every_field_of_a_response_is_described(sections: dict[str, str]) -> None:
    text = sections["Responses"]
    assert [name for name in sorted(KNOWN) if f"`{name}" not in text] == []


def test_every_field_of_embeddings_is_described(sections: dict[str, str]) -> None:
    names = {*EmbeddingRequest.model_fields, *_NEUTRAL}
    assert [name for name in sorted(names) if f"`{name}`" not in sections["Embeddings"]] == []


def test_every_field_without_effect_is_listed(sections: dict[str, str]) -> None:
    text = sections["Fields of both generation routes"].partition("without effect")[2]
    assert [name for name in sorted(NO_EFFECT) if f"`{name}`" not in text] == []


def test_every_refused_field_is_listed(sections: dict[str, str]) -> None:
    text = sections["Fields that are refused"]
    assert [name for name in NOT_SUPPORTED if f"`{name}`" not in text] == []


def test_every_error_type_and_code_is_listed(sections: dict[str, str]) -> None:
    text = sections["Errors"]
    names = {*_TYPES.values(), *_CODES.values()}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
