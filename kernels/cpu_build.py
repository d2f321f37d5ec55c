"""Compiles the native CPU ops with the system's compiler, once a machine, and loads them.

Owns the cache of compiled libraries, and that they share torch's threads. Knows neither torch nor what
the ops do: ``cpu_*.cpp`` and ``cpu_*.h`` are one shared library.

An entry of the cache is a folder ``SOURCES-TARGET-COMPILER`` with the library and its checksum, where
SOURCES hashes every source and the flags, TARGET the processor's model and features, and COMPILER its
path and version. It is built in a folder beside and renamed when complete. Of several processes that
build at once the first to finish leaves its entry. A damaged entry is replaced. Nothing is loaded from a
folder that another user can write to. Where the cache cannot be used, a process builds for itself alone,
in a temporary folder.

The library names no OpenMP runtime, whatever compiled it: its calls (``cpu_threads.h``) bind to the one that
the process has, and two would mean two sets of threads. Load it after torch, which brings its own under a
name of its own.

``python -m octavo.kernels.cpu_build`` fills the cache ahead of time. With ``--portable`` it builds for
the usual generations of processors instead of this one, beside the sources, where every later start
finds them without a compiler: for container images.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .cpu_structs import declare

SOURCES = Path(__file__).resolve().parent
PREPARED = SOURCES / "build"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-Wall", "-Wno-psabi")

_RUNTIMES = ("libgomp", "libiomp5", "libomp.", "libomp-")  # GCC's, Intel's, LLVM's
_LIBRARY, _CHECKSUM, _SCRATCH = "octavo_cpu.so", "sha256", ".build-"
_COMPILE_TIMEOUT = 600.0  # seconds, for one file
_STALE_AGE = 86400.0  # seconds after which a scratch folder belongs to nobody
_ROOM = 4 << 20  # bytes, more than a build takes

# Lines of /proc/cpuinfo that say what code a processor can run.
_CPU_LINES = {
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags", "cpu",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features", "features", "isa",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The native ops, or why there are none."""

    library: ctypes.CDLL | None  # with its functions declared
    detail: str  # where it comes from, or the reason


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of processor to compile for."""

    name: str
    flags: tuple[tuple[str, ...], ...]  # the first that the compiler accepts
    needs: frozenset[str] = frozenset()  # features, as /proc/cpuinfo calls them


class BuildError(Exception):
    """The compiler, or the folder to build in, did not do what was asked."""


class _RefusedError(BuildError):
    """The compiler does not know the target."""


class _FolderError(BuildError):
    """The folder to build in will not do."""


def _x86_64_targets() -> tuple[Target, ...]:
    v3, v4 = ("-march=x86-64-v3",), ("-march=x86-64-v4",)
    vnni = (*v4, "-mavx512vnni")
    bf16 = (*vnni, "-mavx512bf16")
    amx = (*bf16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
    in_v3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
    in_v4 = in_v3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    in_bf16 = in_v4 | {"avx512_vnni", "avx512_bf16"}
    return (
        Target("x86-64-v4-amx", (amx,), in_bf16 | {"amx_tile", "amx_int8", "amx_bf16"}),
        Target("x86-64-v4-bf16", (bf16,), in_bf16),
        Target("x86-64-v4-vnni", (vnni,), in_v4 | {"avx512_vnni"}),
        Target("x86-64-v3-vnni", ((*v3, "-mavxvnni"),), in_v3 | {"avx_vnni"}),
        Target("x86-64-v3", (v3,), in_v3),
    )


def portable_targets() -> tuple[Target, ...]:
    """What to build where the processor is not known yet, the fastest first."""
    machine = platform.machine()
    plain = Target(f"{machine}-plain", ((),))
    return (*_x86_64_targets(), plain) if machine == "x86_64" else (plain,)


def load_library(
    *,
    compiler: str | None = None,
    cache_dir: Path | None = None,
    prepared_dir: Path | None = None,
    sources: Path | None = None,
) -> NativeLibrary:
    """Load the native ops, compiling them if no cached library fits. Never raises for want of them.

    Args:
        compiler: name or path of a C++ compiler; None looks for the usual ones.
        cache_dir: where compiled libraries stay; None is :func:`default_cache_dir`.
        prepared_dir: where libraries may lie that were built ahead of time; None is ``build`` beside
            the sources.
        sources: folder of the sources; None is this module's.
    """
    cache_dir = cache_dir or default_cache_dir()
    folders = (
        (prepared_dir or PREPARED,) if cache_dir is None else (cache_dir, prepared_dir or PREPARED)
    )
    sources = sources or SOURCES
    try:
        source_id = _source_id(sources)
        found = find_compiler(compiler)
        for entry in _entries(source_id, found, folders):
            if _is_trusted(entry) and _is_intact(entry):
                with suppress(BuildError):  # for another C library, it may be
                    return NativeLibrary(_load(entry / _LIBRARY), f"loaded from {entry}")
        if found is None:
            return NativeLibrary(None, f"no C++ compiler ({compiler or ', '.join(COMPILERS)})")
        return _build_and_load(found, source_id, sources, cache_dir)
    except (BuildError, OSError) as error:
        return NativeLibrary(None, str(error))


def default_cache_dir() -> Path | None:
    """The user's cache folder; None without a home. A caller that heeds ``XDG_CACHE_HOME`` passes another."""
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "octavo" / "kernels" if os.path.isabs(home) else None


def find_compiler(name: str | None = None) -> str | None:
    """Path of the compiler called ``name``, or of the first usual one that is installed."""
    for candidate in COMPILERS if name is None else (name,):
        path = shutil.which(candidate)
        if path is not None:
            return path
    return None


# --- what a library is called ------------------------------------------------------------------------


def _source_id(sources: Path) -> str:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in (*_files(sources, "cpu_*.cpp"), *_files(sources, "cpu_*.h")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:20]


def _files(sources: Path, pattern: str) -> list[Path]:
    return sorted(sources.glob(pattern))


def _compiler_id(compiler: str) -> str:
    try:
        told = _run([compiler, "--version"])
    except BuildError:
        told = ""
    return hashlib.sha256(f"{compiler} {told}".encode()).hexdigest()[:12]


def _cpu_lines() -> dict[str, set[str]]:
    """What /proc/cpuinfo says of every processor, by line; nothing where there is no such file."""
    lines: dict[str, set[str]] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            if name in _CPU_LINES:
                lines.setdefault(name, set()).add(value)
    return lines


def _native_target() -> Target:
    """This very processor."""
    known = sorted((name, sorted(values)) for name, values in _cpu_lines().items())
    what = f"{platform.machine()} {known}"
    name = f"native_{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    return Target(name, (("-march=native",), ("-mcpu=native",), ()))


def _entries(source_id: str, compiler: str | None, folders: Sequence[Path]) -> Iterator[Path]:
    """Cached libraries that this processor can run, best first.

    This processor's own come from this compiler, if there is one. Portable ones were built elsewhere.
    """
    made_by = "*" if compiler is None else _compiler_id(compiler)
    features = {word for values in _cpu_lines().get("flags", ()) for word in values.split()}
    names = [f"{source_id}-{_native_target().name}-{made_by}"]
    able = [target for target in portable_targets() if target.needs <= features]
    names += [f"{source_id}-{target.name}-*" for target in able]
    for name in names:
        for folder in folders:
            yield from _files(folder, name)


# --- whether it may be loaded ------------------------------------------------------------------------


def _is_trusted(folder: Path) -> bool:
    """Whether nobody but this user and root can put anything there, nor put another in its place.

    A parent may be writable to its group, or to all if it keeps them from touching each other's files.
    """
    folder = folder.resolve()
    try:
        for path in (folder, folder.parent):
            if not _is_private(path.stat(), stat.S_IWGRP | stat.S_IWOTH):
                return False
        return all(
            parent.stat().st_mode & stat.S_ISVTX or _is_private(parent.stat(), stat.S_IWOTH)
            for parent in folder.parents[1:]
        )
    except OSError:
        return False


def _is_private(status: os.stat_result, forbidden: int) -> bool:
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & forbidden


def _is_intact(entry: Path) -> bool:
    try:
        content = (entry / _LIBRARY).read_bytes()
        return (entry / _CHECKSUM).read_text() == hashlib.sha256(content).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


# --- loading -----------------------------------------------------------------------------------------


def _load(path: Path) -> ctypes.CDLL:
    _provide_openmp()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        library = _load_a_copy(path, error)
    return declare(library)


def _load_a_copy(path: Path, refused: OSError) -> ctypes.CDLL:
    """Load from a temporary folder: nothing on a file system mounted ``noexec`` can be loaded in place."""
    try:
        with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
            return ctypes.CDLL(shutil.copy(path, folder))
    except OSError:
        raise BuildError(str(refused)) from refused


def _provide_openmp() -> None:
    """Offer the process's OpenMP runtime to libraries that are loaded later.

    torch loads its own for itself only, some builds under a name like ``libgomp-24e2ab19.so.1``, so a
    library that asked for ``libgomp.so.1`` would get a second one with threads of its own.
    """
    mapped = _mapped_runtimes()
    of_torch = [path for path in mapped if "/torch" in path]
    ctypes.CDLL((of_torch or mapped or ["libgomp.so.1"])[0], mode=ctypes.RTLD_GLOBAL)


def _mapped_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes in this process. All have GCC's interface."""
    paths: dict[str, None] = {}
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and os.path.basename(fields[5]).startswith(_RUNTIMES):
                paths[fields[5]] = None
    return list(paths)


# --- building ----------------------------------------------------------------------------------------


def _build_and_load(
    compiler: str, source_id: str, sources: Path, cache_dir: Path | None
) -> NativeLibrary:
    """Compile for this processor, load, and leave the library in the cache if that can be used."""
    target, began = _native_target(), time.monotonic()
    final: Path | None = None
    try:
        if cache_dir is None:
            raise _FolderError("this user has no home")
        final = cache_dir / f"{source_id}-{target.name}-{_compiler_id(compiler)}"
        with _scratch(cache_dir, 0o700) as scratch:
            entry = build(compiler, target, sources, scratch)
            library = _load(entry / _LIBRARY)
            why = "" if _publish(entry, final) else f"cannot write {final}"
    except (_FolderError, OSError) as error:
        why = str(error)
        with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
            library = _load(build(compiler, target, sources, Path(folder)) / _LIBRARY)
    took = f"compiled by {compiler} in {time.monotonic() - began:.1f} s"
    kept = f"not kept for the next start: {why}" if why else f"kept in {final}"
    return NativeLibrary(library, f"{took}, {kept}")


@contextmanager
def _scratch(folder: Path, mode: int) -> Iterator[Path]:
    """A new folder inside ``folder``, which is made if need be. Sweeps what killed builds left."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)
    for left in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_AGE:
                shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
    try:
        if not _is_trusted(scratch):
            raise _FolderError(f"others can write to {folder}")
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def build(compiler: str, target: Target, sources: Path, scratch: Path) -> Path:
    """Compile ``sources`` inside ``scratch`` → a complete cache entry there."""
    try:
        return _build(compiler, target, sources, scratch)
    except BuildError:
        _demand_room(scratch)
        raise


def _demand_room(folder: Path) -> None:
    """Raise OSError if no more can be written: a compiler's own words for that are not to be relied on."""
    probe = folder / "room"
    probe.write_bytes(bytes(_ROOM))
    probe.unlink()


def _build(compiler: str, target: Target, sources: Path, scratch: Path) -> Path:
    flags = [*FLAGS, *_accepted(compiler, target, scratch)]

    def compile_one(source: Path) -> Path:
        product = scratch / f"{source.stem}.o"
        _compile([compiler, *flags, "-c", str(source), "-o", str(product)], scratch)
        return product

    files = sorted(_files(sources, "cpu_*.cpp"), key=lambda path: -path.stat().st_size)
    if not files:
        raise BuildError(f"no sources in {sources}")
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
        products = [str(product) for product in pool.map(compile_one, files)]
    entry = scratch / "entry"
    entry.mkdir()
    library = entry / _LIBRARY
    _compile([compiler, "-shared", *products, "-o", str(library)], scratch)
    (entry / _CHECKSUM).write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    for path, mode in ((entry, 0o755), (library, 0o644), (entry / _CHECKSUM, 0o644)):
        path.chmod(mode)
    return entry


def _accepted(compiler: str, target: Target, scratch: Path) -> tuple[str, ...]:
    """The first of the target's flags that the compiler takes."""
    for flags in target.flags:
        with suppress(BuildError):
            probe = ["-x", "c++", "-c", os.devnull, "-o", str(scratch / "probe.o")]
            _compile([compiler, *flags, *probe], scratch)
            return flags
    raise _RefusedError(f"{compiler} cannot compile for {target.name}")


def _publish(entry: Path, final: Path) -> bool:
    """Move a complete entry to its place, unless another process was faster → whether one is there."""
    for attempt in range(2):
        with suppress(OSError):
            os.rename(entry, final)  # refused if `final` is a folder with something in it
            return True
        if _is_intact(final):
            return True
        with suppress(OSError):
            os.rename(final, entry.parent / f"damaged{attempt}")
    return False


def _compile(command: Sequence[str], scratch: Path) -> None:
    """Run a compiler whose temporary files are in ``scratch``: there may be no other place for them."""
    _run(["env", f"TMPDIR={scratch}", *command], command[0])


def _run(command: Sequence[str], name: str | None = None) -> str:
    name = name or command[0]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{name}: {error}") from error
    code = done.returncode
    if code != 0:
        lines = (line for line in done.stderr.splitlines() if "error:" in line.lower())
        why = next(lines, done.stderr[-500:]).strip()
        how = f"was killed by signal {-code}" if code < 0 else f"failed with {code}"
        raise BuildError(f"{name} {how}: {why}" if why else f"{name} {how}")
    return done.stdout


# --- ahead of time -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the cache, or the folder beside the sources with portable libraries."""
    parser = argparse.ArgumentParser(
        prog="octavo.kernels.cpu_build", description="Build the CPU ops."
    )
    parser.add_argument("--cache-dir", type=Path, help="folder for the libraries")
    parser.add_argument("--compiler", help=f"default: the first of {', '.join(COMPILERS)}")
    parser.add_argument(
        "--portable", action="store_true", help="for processors other than this one"
    )
    options = parser.parse_args(arguments)
    if options.portable:
        return _build_portable(options.compiler, options.cache_dir or PREPARED)
    result = load_library(compiler=options.compiler, cache_dir=options.cache_dir)
    sys.stdout.write(f"{result.detail}\n")
    return 0 if result.library is not None else 1


def _build_portable(name: str | None, folder: Path) -> int:
    compiler = find_compiler(name)
    if compiler is None:
        sys.stdout.write(f"no C++ compiler ({name or ', '.join(COMPILERS)})\n")
        return 1
    status = 0
    for target in portable_targets():
        final = folder / f"{_source_id(SOURCES)}-{target.name}-{_compiler_id(compiler)}"
        try:
            _prepare(compiler, target, final)
            sys.stdout.write(f"{final}\n")
        except _RefusedError as error:  # an older compiler: those processors get the next best
            sys.stdout.write(f"left out: {error}\n")
        except (BuildError, OSError) as error:
            sys.stdout.write(f"{target.name}: {error}\n")
            status = 1
    return status


def _prepare(compiler: str, target: Target, final: Path) -> None:
    """Build an entry that this processor may not be able to run."""
    if _is_intact(final):
        return
    with _scratch(final.parent, 0o755) as scratch:
        if not _publish(build(compiler, target, SOURCES, scratch), final):
            raise BuildError(f"cannot write {final}")


if __name__ == "__main__":
    sys.exit(main())
