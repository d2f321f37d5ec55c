"""Where the checkout is, for tests about the repository itself."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tracked_files() -> list[str]:
    """Paths of all files that git knows or would add, relative to the root, symlinks left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = [path for path in listing.split("\0") if path]
    return [p for p in paths if (ROOT / p).is_file() and not (ROOT / p).is_symlink()]


@pytest.fixture(scope="session")
def docs_generator() -> ModuleType:
    """``docs/generate.py``, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
