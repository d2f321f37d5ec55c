"""The wheel holds the whole package, though its folders are symlinks in the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

COPIED = ("octavo", "server", "engine", "kernels", "configs")


@pytest.fixture(scope="module")
def wheel_names(root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built, as the container does it, from a copy of the folders."""
    source = tmp_path_factory.mktemp("source")
    for folder in COPIED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / folder, source / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / file, source)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run = subprocess.run(
        [*command, "--wheel-dir", str(out), str(source)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = out.glob("octavo-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_preset(root: Path, wheel_names: set[str]) -> None:
    wanted = {"octavo/py.typed"}
    wanted |= {f"octavo/{path.name}" for path in (root / "octavo").glob("*.py")}
    for room in ("server", "engine", "kernels"):
        wanted |= {f"octavo/{path.relative_to(root)}" for path in (root / room).rglob("*.py")}
    wanted |= {f"octavo/configs/{path.name}" for path in (root / "configs").glob("*.yaml")}
    assert sorted(wanted - wheel_names) == []


@pytest.mark.slow
def test_the_wheel_holds_nothing_beside_octavo(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"octavo"}
