"""Every metric that a page, dashboard or alert names is one that the server exposes."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

NAME = re.compile(r"\b((?:vllm|octavo):[a-z][a-z0-9_]*[a-z0-9])\b")
READERS = (".md", ".yaml", ".yml", ".json", ".py")
"""Kinds of files that may name metrics. The server's own sources are where they are defined."""


@pytest.fixture(scope="module")
def exposed(docs_generator: ModuleType) -> set[str]:
    """Names of all families, and of all samples as they stand in the text format."""
    names: set[str] = set()
    for family in docs_generator.metric_families():
        names.add(f"{family.name}_total" if family.type == "counter" else family.name)
        names |= {sample.name for sample in family.samples}
    return names


def test_named_metrics_exist(root: Path, tracked_files: list[str], exposed: set[str]) -> None:
    unknown = []
    for path in tracked_files:
        if not path.endswith(READERS) or path.startswith(("server/", "tests/", "engine/")):
            continue
        named = set(NAME.findall((root / path).read_text()))
        unknown += [f"{path}: {name}" for name in sorted(named - exposed)]
    assert unknown == []


def test_every_metric_says_what_it_means(docs_generator: ModuleType) -> None:
    families = docs_generator.metric_families()
    assert len(families) > 40
    assert [family.name for family in families if not family.documentation.strip()] == []
