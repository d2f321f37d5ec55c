"""docs/offline.md names everything that ``LLM`` takes, passes over and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.llm import LLM
from octavo.engine.service.offline_methods import ABSENT
from octavo.engine.service.offline_options import NEUTRAL, WITHOUT_EFFECT


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "offline.md").read_text()


@pytest.mark.parametrize("names", [ABSENT, NEUTRAL, WITHOUT_EFFECT])
def test_every_name_is_on_the_page(page: str, names: dict[str, object] | frozenset[str]) -> None:
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_every_method_is_on_the_page(page: str) -> None:
    methods = [name for name in vars(LLM) if not name.startswith("_") and name != "get_world_size"]
    assert [name for name in methods if f"`{name}(" not in page] == []


def test_what_there_is_not_is_not_there() -> None:
    assert [name for name in ABSENT if name in vars(LLM)] == []
