"""What must not be in the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|root|farm|home/[a-z]+)/")
REGISTRY_HOSTS = re.compile(
    r"\b(?:pypi\.org|files\.pythonhosted\.org|registry\.npmjs\.org|deb\.debian\.org|proxy\.golang\.org)\b"
)
GENERATED = re.compile(r"(?:__pycache__|\.egg-info|\.pyc$|\.so$|\.venv/|\.DS_Store)")
MAX_FILE_BYTES = 1 << 20


def _texts(root: Path, paths: list[str]) -> dict[str, str]:
    mine = str(Path(__file__).resolve().relative_to(root))
    texts = {}
    for path in paths:
        data = (root / path).read_bytes()
        if path != mine and b"\0" not in data:
            texts[path] = data.decode()
    return texts


def _hits(pattern: re.Pattern[str], texts: dict[str, str]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_file_names_a_machines_paths(root: Path, tracked_files: list[str]) -> None:
    assert _hits(MACHINE_PATHS, _texts(root, tracked_files)) == []


def test_no_file_names_a_package_registry(root: Path, tracked_files: list[str]) -> None:
    assert _hits(REGISTRY_HOSTS, _texts(root, tracked_files)) == []


def test_no_build_product_and_no_big_file_is_tracked(root: Path, tracked_files: list[str]) -> None:
    assert [path for path in tracked_files if GENERATED.search(path)] == []
    big = [path for path in tracked_files if (root / path).stat().st_size > MAX_FILE_BYTES]
    assert big == []


def test_the_import_name_is_made_of_relative_symlinks(root: Path) -> None:
    links = {
        path.name: os.readlink(path) for path in (root / "octavo").iterdir() if path.is_symlink()
    }
    assert links == {name: f"../{name}" for name in ("server", "engine", "kernels", "configs")}


def test_what_ci_runs_is_executable(root: Path) -> None:
    assert os.access(root / ".ci" / "run", os.X_OK)
    script = (root / ".ci" / "run").read_text()
    assert "make check" in script
    assert "make test-clients" in script
