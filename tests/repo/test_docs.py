"""Pages say what the code does: generated ones are up to date, links lead somewhere."""

from __future__ import annotations

import re
from dataclasses import Field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo import __version__
from octavo.engine.config.options import flag_of
from octavo.engine.config.sections import all_options, default_text

PATH_IN_TEXT = re.compile(
    r"`((?:server|engine|kernels|configs|tests|docs|benchmarks|deploy|examples)/[\w./-]*)`"
)
OPTIONS = [option_field for _, option_field in all_options()]


def test_generated_pages_are_up_to_date(root: Path, docs_generator: ModuleType) -> None:
    for name, render in docs_generator.PAGES.items():
        assert (root / "docs" / name).read_text() == render(), f"{name} is stale: run 'make docs'"


@pytest.mark.parametrize("option_field", OPTIONS, ids=lambda f: f.name)
def test_configuration_page_has_unit_and_default_of_every_flag(
    root: Path, option_field: Field[Any]
) -> None:
    page = (root / "docs" / "configuration.md").read_text().splitlines()
    rows = [line for line in page if line.startswith(f"| `{flag_of(option_field.name)}` |")]
    assert len(rows) == 1
    assert rows[0].rstrip(" |").endswith(default_text(option_field))
    assert (option_field.metadata["unit"] or "") in rows[0]


def test_version_is_the_changelogs_top_entry(root: Path) -> None:
    entries = re.findall(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == __version__


def test_relative_links_lead_to_files(root: Path, tracked_files: list[str]) -> None:
    pages = [path for path in tracked_files if path.endswith(".md")]
    broken = [
        f"{page}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", (root / page).read_text())
        if "://" not in target and not (root / page).parent.joinpath(target).exists()
    ]
    assert broken == []


def test_paths_named_in_the_pages_exist(root: Path) -> None:
    """Recipes and the map name real files. A trailing slash marks a folder; <name> is a blank."""
    pages = [root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    missing = [
        f"{page.name}: {path}"
        for page in pages
        for path in PATH_IN_TEXT.findall(page.read_text())
        if not (root / path).exists()
    ]
    assert missing == []


def test_make_targets_named_in_the_pages_exist(root: Path, tracked_files: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for page in tracked_files
        if page.endswith(".md")
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", (root / page).read_text(), re.MULTILINE)
    }
    assert {"serve", "test", "check", "fmt", "docs"} <= named <= targets


def test_decision_records_are_short_and_complete(root: Path) -> None:
    records = sorted((root / "docs" / "adr").glob("*.md"))
    assert [record.name[:4] for record in records] == [
        f"{number:04d}" for number in range(1, len(records) + 1)
    ]
    for record in records:
        text = record.read_text()
        assert text.count("\n") < 60, record.name
        for heading in ("## Context", "## Decision", "## Consequences"):
            assert heading in text, f"{record.name} lacks '{heading}'"
