"""The import contracts in pyproject.toml: they see every module, and all are kept."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import grimp
import pytest

ROOMS = ("server", "engine", "kernels")


def _modules_on_disk(root: Path) -> set[str]:
    """Names of all modules below the top-level folders, reached by their import name."""
    found = {
        "octavo" if path.stem == "__init__" else f"octavo.{path.stem}"
        for path in (root / "octavo").glob("*.py")
    }
    for room in ROOMS:
        for path in (root / room).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found.add(".".join(("octavo", *(p for p in parts if p != "__init__"))))
    return found


def test_the_import_graph_holds_every_module(root: Path) -> None:
    graph = grimp.build_graph("octavo", include_external_packages=False, cache_dir=None)
    assert graph.modules == _modules_on_disk(root)
    assert len(graph.modules) > 30, "the symlinked folders are not followed"


def test_no_folder_lacks_its_init(root: Path) -> None:
    """A folder without __init__.py is invisible to grimp, mypy and the wheel."""
    folders = {path.parent for room in ROOMS for path in (root / room).rglob("*.py")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_all_contracts_are_kept(root: Path) -> None:
    run = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "lint-imports", "--no-cache", "--no-logo"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(contracts['contracts'])} kept, 0 broken" in run.stdout


@pytest.mark.parametrize("room", ROOMS)
def test_no_absolute_import_inside_the_package(root: Path, room: str) -> None:
    """Relative imports keep every tool that reads by path at one view of the package."""
    offenders = [
        f"{path.relative_to(root)}:{number}"
        for path in (root / room).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip().startswith(("from octavo", "import octavo"))
    ]
    assert offenders == []


def test_no_folder_of_ours_is_importable_without_octavo() -> None:
    code = (
        "import importlib.util as u\n"
        "for name in ('kernels', 'engine', 'server', 'configs'):\n"
        "    spec = u.find_spec(name)\n"
        "    print(name, spec.origin if spec else None, list(spec.submodule_search_locations or [])"
        " if spec else [])\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    ours = str(Path(__file__).resolve().parents[2])
    assert [line for line in run.stdout.splitlines() if ours in line] == []
