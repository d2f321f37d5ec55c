"""Building, caching and loading the native ops, mostly with sources of a few lines; and programs."""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.kernels import cpu_build, cpu_structs
from octavo.kernels.cpu_build import NativeLibrary, load_library

pytestmark = pytest.mark.native

COMPILER = cpu_build.find_compiler()
INSTALLED = [name for name in ("g++", "clang++") if shutil.which(name)]

TINY = """
#include <atomic>
#include "cpu_threads.h"
#include "cpu_tiny.h"
namespace octavo { bool is_forked() { return false; } }
extern "C" int tiny_value() { return VALUE; }
extern "C" int tiny_threads() {
  std::atomic<int> count{0};
  octavo::run_team(2, [&](int64_t, int64_t) { count++; });
  return count;
}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder of sources whose library says 7."""
    folder = tmp_path / "sources"
    folder.mkdir()
    shutil.copy(cpu_build.SOURCES / "cpu_threads.h", folder)
    (folder / "cpu_tiny.h").write_text("#define VALUE 7\n")
    (folder / "cpu_tiny.cpp").write_text(TINY)
    (folder / "cpu_more.cpp").write_text("int more() { return 1; }\n")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "octavo"


@pytest.fixture
def counted(tmp_path: Path) -> CountedCompiler:
    return CountedCompiler(tmp_path / "counted")


class CountedCompiler:
    """The compiler behind a script that keeps a list of what it was asked for."""

    def __init__(self, folder: Path, before: str = "") -> None:
        folder.mkdir()
        self.log = folder / "log"
        self.path = folder / "g++"
        script = f'#!/bin/sh\n{before}\necho "$@" >> {self.log}\nexec {COMPILER} "$@"\n'
        self.path.write_text(script)
        self.path.chmod(0o755)

    @property
    def num_links(self) -> int:
        return sum("-shared" in line for line in self.log.read_text().splitlines())


def value_of(result: NativeLibrary) -> int:
    assert result.library is not None, result.detail
    value: int = result.library.tiny_value()
    return value


def run_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 0, told
    return told


# --- cache ---------------------------------------------------------------------------------------


def test_second_load_compiles_nothing(tiny: Path, cache: Path, counted: CountedCompiler) -> None:
    first = load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
    second = load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
    assert (value_of(first), value_of(second)) == (7, 7)
    assert counted.num_links == 1
    assert "compiled by" in first.detail
    assert second.detail.startswith(f"loaded from {cache}")
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["cpu_tiny.h", "cpu_more.cpp"])
def test_changed_source_is_compiled_anew(name: str, tiny: Path, cache: Path) -> None:
    load_library(cache_dir=cache, sources=tiny)
    with (tiny / name).open("a") as file:
        file.write("#undef VALUE\n#define VALUE 8\n")
    result = load_library(cache_dir=cache, sources=tiny)
    assert value_of(result) == (8 if name == "cpu_tiny.h" else 7)
    assert "compiled by" in result.detail


def test_other_processor_or_compiler_is_another_entry(
    tiny: Path, cache: Path, counted: CountedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
    monkeypatch.setattr(cpu_build, "_cpu_lines", lambda: {"model name": {"another"}})
    load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
    assert counted.num_links == 2
    monkeypatch.undo()
    script = counted.path.read_text()
    counted.path.write_text(script.replace("echo", '[ "$1" = --version ] && echo 99\necho', 1))
    load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
    assert counted.num_links == 3
    assert len(list(cache.iterdir())) == 3


def truncate(entry: Path) -> None:
    library = entry / "octavo_cpu.so"
    os.truncate(library, library.stat().st_size // 2)


def flip_a_bit(entry: Path) -> None:
    library = entry / "octavo_cpu.so"
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def lose_checksum(entry: Path) -> None:
    (entry / "sha256").unlink()


def garble_checksum(entry: Path) -> None:
    (entry / "sha256").write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lose_checksum, garble_checksum])
def test_damaged_entry_is_replaced(
    damage: object, tiny: Path, cache: Path, counted: CountedCompiler
) -> None:
    built = cpu_build.build(str(counted.path), cpu_build._native_target(), tiny, fresh(tiny))
    load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
    (entry,) = cache.iterdir()
    shutil.rmtree(entry)  # the library that this process has loaded keeps its file
    shutil.copytree(built, entry)
    assert callable(damage)
    damage(entry)
    links = counted.num_links
    assert value_of(load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)) == 7
    assert counted.num_links == links + 1
    assert cpu_build._is_intact(entry)
    assert list(cache.iterdir()) == [entry]
    load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
    assert counted.num_links == links + 1


def fresh(beside: Path) -> Path:
    folder = beside.parent / "scratch"
    folder.mkdir()
    return folder


LOAD = """
import sys
from pathlib import Path
from octavo.kernels.cpu_build import load_library
cache, sources, compiler = sys.argv[1:]
result = load_library(compiler=compiler, cache_dir=Path(cache), sources=Path(sources))
assert result.library is not None, result.detail
print(result.library.tiny_value(), result.detail)
"""


def test_four_processes_build_at_once(tiny: Path, cache: Path, tmp_path: Path) -> None:
    linger = 'case "$*" in *-shared*) sleep 1;; esac'
    compiler = CountedCompiler(tmp_path / "slow", before=linger)
    processes = [run_python(LOAD, cache, tiny, compiler.path) for _ in range(4)]
    told = [output_of(process) for process in processes]
    assert [line.split()[0] for line in told] == ["7"] * 4
    assert compiler.num_links > 1, "no two built at once"
    (entry,) = cache.iterdir()
    assert cpu_build._is_intact(entry)
    assert all(str(entry) in line for line in told)


def test_loser_keeps_the_winners_entry(tiny: Path, cache: Path) -> None:
    assert COMPILER is not None
    target = cpu_build._native_target()
    folders = [cache / name for name in ("one", "two")]
    entries = []
    for folder in folders:
        folder.mkdir(parents=True)
        entries.append(cpu_build.build(COMPILER, target, tiny, folder))
    final = cache / "final"
    assert cpu_build._publish(entries[0], final)
    winner = (final / "octavo_cpu.so").stat().st_ino
    assert cpu_build._publish(entries[1], final)
    assert (final / "octavo_cpu.so").stat().st_ino == winner


def test_scratch_folders_of_killed_builds_are_swept(tiny: Path, cache: Path) -> None:
    old, recent = cache / ".build-old", cache / ".build-recent"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    cache.chmod(0o700)
    load_library(cache_dir=cache, sources=tiny)
    assert not old.exists()
    assert recent.exists()


# --- folders that cannot or must not be used -------------------------------------------------------


def test_impossible_folder_builds_for_this_process_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    result = load_library(cache_dir=tmp_path / "file" / "cache", sources=tiny)
    assert value_of(result) == 7
    assert "not kept for the next start" in result.detail
    assert list(private.iterdir()) == []


READ_ONLY = """
import os, sys, tempfile
from pathlib import Path
from octavo.kernels.cpu_build import load_library
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # permissions do not hold root back
try:
    open(sys.argv[1] + "/probe", "w")
except PermissionError:
    pass
else:
    raise AssertionError("the folder is not read-only")
result = load_library(cache_dir=Path(sys.argv[1]), sources=Path(sys.argv[2]))
assert result.library is not None, result.detail
print(result.library.tiny_value(), result.detail)
"""


@pytest.mark.parametrize("is_filled", [False, True])
def test_read_only_folder(is_filled: bool, tiny: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # another user has to get here
        cache, sources = Path(folder, "cache"), Path(folder, "sources")
        cache.mkdir()
        shutil.copytree(tiny, sources)
        if is_filled:
            load_library(cache_dir=cache, sources=sources)
        cache.chmod(0o555)
        try:
            told = output_of(run_python(READ_ONLY, cache, sources))
        finally:
            cache.chmod(0o755)
        assert len(list(cache.iterdir())) == int(is_filled)
    assert told.startswith("7 loaded from" if is_filled else "7 compiled by")
    assert is_filled or "Permission denied" in told


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_nothing_is_loaded_from_a_folder_that_others_can_write(
    mode: int, tiny: Path, cache: Path
) -> None:
    load_library(cache_dir=cache, sources=tiny)
    (entry,) = cache.iterdir()
    cache.chmod(mode)
    result = load_library(cache_dir=cache, sources=tiny)
    assert value_of(result) == 7
    assert f"others can write to {cache}" in result.detail
    assert list(cache.iterdir()) == [entry]


def test_parent_that_others_can_write_is_seen(tiny: Path, cache: Path) -> None:
    load_library(cache_dir=cache, sources=tiny)
    cache.parent.parent.chmod(0o777)
    assert "others can write" in load_library(cache_dir=cache, sources=tiny).detail
    cache.parent.parent.chmod(0o1777)  # as /tmp: everyone may add, nobody may replace
    assert load_library(cache_dir=cache, sources=tiny).detail.startswith("loaded from")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_nothing_is_loaded_from_another_users_folder(tiny: Path, cache: Path) -> None:
    load_library(cache_dir=cache, sources=tiny)
    os.chown(cache, 65534, 65534)
    assert "others can write" in load_library(cache_dir=cache, sources=tiny).detail


def test_full_file_system_builds_for_this_process_alone(
    tiny: Path, cache: Path, tmp_path: Path
) -> None:
    """Nothing more can be written to the cache: there is a folder where a file would be."""
    fail = f'case "$*" in *{cache}*) mkdir -p "$TMPDIR/room"; exit 1;; esac'
    compiler = CountedCompiler(tmp_path / "full", before=fail)
    result = load_library(compiler=str(compiler.path), cache_dir=cache, sources=tiny)
    assert value_of(result) == 7
    assert "not kept for the next start" in result.detail
    assert list(cache.iterdir()) == []


@pytest.fixture
def noexec(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be loaded from the cache, as where it is mounted without permission to execute."""
    load = ctypes.CDLL

    def refusing(name: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
        if name.startswith(str(cache)):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name, mode=mode)

    monkeypatch.setattr(ctypes, "CDLL", refusing)


@pytest.mark.usefixtures("noexec")
def test_folder_that_nothing_is_loaded_from_still_saves_compiling(
    tiny: Path, cache: Path, counted: CountedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        result = load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
        assert value_of(result) == 7
    assert counted.num_links == 1
    monkeypatch.setattr(tempfile, "tempdir", str(cache))
    result = load_library(compiler=str(counted.path), cache_dir=cache, sources=tiny)
    assert result.library is None
    assert "failed to map segment" in result.detail


def test_entry_that_does_not_load_is_passed_over(tiny: Path, cache: Path, tmp_path: Path) -> None:
    """As one that was prepared for another C library."""
    prepared, foreign = tmp_path / "prepared", tmp_path / "foreign"
    shutil.copytree(tiny, foreign)
    (foreign / "cpu_tiny.cpp").write_text("int nonesuch(); int tiny_value() { return nonesuch(); }")
    assert COMPILER is not None
    plain = cpu_build.portable_targets()[-1]
    entry = cpu_build.build(COMPILER, plain, foreign, fresh(tiny))
    shutil.copytree(entry, prepared / f"{cpu_build._source_id(tiny)}-{plain.name}-0")
    result = load_library(cache_dir=cache, prepared_dir=prepared, sources=tiny)
    assert value_of(result) == 7
    assert "compiled by" in result.detail


def test_user_without_a_home(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    result = load_library(sources=tiny)
    assert value_of(result) == 7
    assert "this user has no home" in result.detail
    assert [path.name for path in tmp_path.iterdir()] == ["sources"]


def test_folders_may_have_blanks_in_their_names(tiny: Path, tmp_path: Path) -> None:
    sources, cache = tmp_path / "some sources", tmp_path / "a cache"
    shutil.copytree(tiny, sources)
    assert "kept in" in load_library(cache_dir=cache, sources=sources).detail
    assert value_of(load_library(cache_dir=cache, sources=sources)) == 7


# --- compilers -------------------------------------------------------------------------------------


def test_no_compiler(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("PATH", str(tmp_path))
    result = load_library(cache_dir=cache, sources=tiny)
    assert result == NativeLibrary(None, "no C++ compiler (g++, c++, clang++)")
    assert load_library(compiler="nonesuch", cache_dir=cache, sources=tiny).library is None
    assert not cache.exists()


def test_cached_library_needs_no_compiler(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(cache_dir=cache, sources=tiny)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert value_of(load_library(cache_dir=cache, sources=tiny)) == 7


def test_compile_error_is_the_reason(tiny: Path, cache: Path) -> None:
    (tiny / "cpu_more.cpp").write_text("int more() { return nonesuch; }\n")
    result = load_library(cache_dir=cache, sources=tiny)
    assert result.library is None
    assert "nonesuch" in result.detail
    assert "cpu_more.cpp:1" in result.detail
    assert list(cache.iterdir()) == []


def test_function_that_nobody_defines_is_the_reason(tiny: Path, cache: Path) -> None:
    (tiny / "cpu_more.cpp").write_text("int nonesuch();\nint more() { return nonesuch(); }\n")
    result = load_library(cache_dir=cache, sources=tiny)
    assert result.library is None
    assert "nonesuch" in result.detail
    assert list(cache.iterdir()) == []


def test_compilers_temporary_files_are_in_the_cache(
    tiny: Path, cache: Path, tmp_path: Path
) -> None:
    """The usual place for them may be full or read-only."""
    told = tmp_path / "told"
    compiler = CountedCompiler(tmp_path / "telling", before=f'echo "$TMPDIR" >> {told}')
    load_library(compiler=str(compiler.path), cache_dir=cache, sources=tiny)
    places = {line for line in told.read_text().splitlines() if line.startswith(str(cache))}
    assert len(places) == 1


def test_compiler_that_is_killed_is_the_reason(tiny: Path, cache: Path, tmp_path: Path) -> None:
    kill = 'case "$*" in *cpu_more.cpp*) kill -9 $$;; esac'
    compiler = CountedCompiler(tmp_path / "killed", before=kill)
    result = load_library(compiler=str(compiler.path), cache_dir=cache, sources=tiny)
    assert result == NativeLibrary(None, f"{compiler.path} was killed by signal 9")
    assert list(cache.iterdir()) == []


def test_compiler_that_refuses_native(tiny: Path, cache: Path, tmp_path: Path) -> None:
    refuse = 'case "$*" in *=native*) echo "error: no such processor" >&2; exit 1;; esac'
    compiler = CountedCompiler(tmp_path / "refusing", before=refuse)
    result = load_library(compiler=str(compiler.path), cache_dir=cache, sources=tiny)
    assert value_of(result) == 7


def test_environment_is_not_read(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("CXXFLAGS", "-DVALUE=9 --nonesuch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert value_of(load_library(cache_dir=cache, sources=tiny)) == 7
    assert tmp_path not in (cpu_build.default_cache_dir() or Path()).parents
    source = Path(cpu_build.__file__).read_text()
    names = {
        node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        for node in ast.walk(ast.parse(source))
    }
    assert not names & {"environ", "environb", "getenv", "getenvb"}


# --- one OpenMP runtime ----------------------------------------------------------------------------

AFTER_TORCH = """
import os, sys
from pathlib import Path
import torch
from octavo.kernels.cpu_build import load_library
torch.set_num_threads(2)
torch.ones(4_000_000).add(1).sum()
before = len(os.listdir("/proc/self/task"))
result = load_library(compiler=sys.argv[3], cache_dir=Path(sys.argv[1]), sources=Path(sys.argv[2]))
assert result.library is not None, result.detail
assert result.library.tiny_threads() == 2
assert len(os.listdir("/proc/self/task")) == before, "threads of its own"
lines = Path("/proc/self/maps").read_text().splitlines()
print(*sorted({line.split()[-1] for line in lines if "libgomp" in line or "omp." in line or "omp5" in line}))
"""

AFTER_RENAMED = """
import ctypes, sys
from pathlib import Path
from octavo.kernels.cpu_build import load_library
ctypes.CDLL(sys.argv[3])
result = load_library(cache_dir=Path(sys.argv[1]), sources=Path(sys.argv[2]))
assert result.library is not None, result.detail
assert result.library.tiny_threads() == 2
lines = Path("/proc/self/maps").read_text().splitlines()
print(*sorted({line.split()[-1] for line in lines if "libgomp" in line}))
"""


@pytest.mark.parametrize("compiler", INSTALLED)
def test_threads_are_shared_with_torch(compiler: str, tiny: Path, cache: Path) -> None:
    runtimes = output_of(run_python(AFTER_TORCH, cache, tiny, compiler)).split()
    assert len(runtimes) == 1
    assert "torch" in runtimes[0]


def test_runtime_under_another_name_is_shared(tiny: Path, cache: Path, tmp_path: Path) -> None:
    """As in builds of torch that rename what they bundle: nothing there answers to libgomp.so.1."""
    assert COMPILER is not None
    ask = [COMPILER, "-print-file-name=libgomp.so.1"]
    original = Path(subprocess.check_output(ask, text=True).strip())
    if not original.is_file():
        pytest.skip("no libgomp.so.1")
    renamed = tmp_path / "torch" / "libgomp_so.1"
    renamed.parent.mkdir()
    content = original.read_bytes()
    assert b"libgomp.so.1\0" in content
    renamed.write_bytes(content.replace(b"libgomp.so.1\0", b"libgomp_so.1\0"))
    assert output_of(run_python(AFTER_RENAMED, cache, tiny, renamed)).split() == [str(renamed)]


# --- ahead of time ---------------------------------------------------------------------------------


def test_ahead_of_time_for_this_processor(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_build, "SOURCES", tiny)
    assert cpu_build.main(["--cache-dir", str(cache)]) == 0
    assert "kept in" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "/nonexistent")
    assert value_of(load_library(cache_dir=cache)) == 7
    (tiny / "cpu_more.cpp").write_text("error")
    assert cpu_build.main(["--cache-dir", str(cache)]) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 generations")
def test_ahead_of_time_for_other_processors(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = tmp_path / "prepared"
    monkeypatch.setattr(cpu_build, "SOURCES", tiny)
    monkeypatch.setattr(cpu_build, "PREPARED", prepared)
    assert cpu_build.main(["--portable"]) == 0
    assert prepared.stat().st_mode & 0o777 == 0o755
    assert len(list(prepared.iterdir())) == len(cpu_build.portable_targets())
    monkeypatch.setenv("PATH", "/nonexistent")
    chosen = []
    targets = {target.name: target for target in cpu_build.portable_targets()}
    names = ("x86_64-plain", "x86-64-v3", "x86-64-v4-vnni")
    for name in names:
        lines = {"flags": {" ".join(targets[name].needs)}}
        monkeypatch.setattr(cpu_build, "_cpu_lines", lambda lines=lines: lines)
        result = load_library(cache_dir=cache)
        assert value_of(result) == 7
        chosen.append(result.detail)
    for name, detail in zip(names, chosen, strict=True):
        assert f"-{name}-" in detail
    assert cpu_build.main(["--portable"]) == 1  # no compiler


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 generations")
def test_target_that_the_compiler_does_not_know_is_left_out(
    tiny: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cpu_build, "SOURCES", tiny)
    refuse = 'case "$*" in *amx*) echo "error: what is amx?" >&2; exit 1;; esac'
    compiler = CountedCompiler(tmp_path / "older", before=refuse)
    arguments = ["--portable", "--cache-dir", str(cache), "--compiler", str(compiler.path)]
    assert cpu_build.main(arguments) == 0
    assert "left out" in capsys.readouterr().out
    assert len(list(cache.iterdir())) == len(cpu_build.portable_targets()) - 1
    (tiny / "cpu_more.cpp").write_text("error")
    assert cpu_build.main(arguments) == 1


@pytest.mark.slow
@pytest.mark.parametrize("compiler", INSTALLED)
@pytest.mark.parametrize("target", cpu_build.portable_targets(), ids=lambda target: target.name)
def test_the_ops_compile_for_every_target_without_a_warning(
    target: cpu_build.Target, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-O0", "-Werror"))
    cpu_build.build(compiler, target, cpu_build.SOURCES, tmp_path)


# --- programs --------------------------------------------------------------------------------------

# A sample op claims `num_rows` pieces and adds 1 to each cell that still holds what the op before left. A gate op
# moves each of its tokens' cells on from `kind` to `kind + 1`, an embed op from `dtype` to `dtype + 1`. But a
# norm finds no memory.
CHAIN = """
#include <new>
#include "cpu_ops.h"
#include "cpu_program.h"
#include "cpu_threads.h"
namespace octavo {
void sample_part(const SampleArgs& a, const Team& team) {
  team.claim(*a.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      if (a.out[*a.num_rows - 1 - i] == a.vocab_size) a.out[*a.num_rows + i] += 1;
  });
}
void gate_rows(const GateArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) a.out[i] = a.out[i] == float(a.kind) ? a.kind + 1 : -1;
}
void embed_rows(const EmbedArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) a.out[i] = a.out[i] == float(a.dtype) ? a.dtype + 1 : -1;
}
void rms_norm_rows(const RmsNormArgs&, int64_t, int64_t) { throw std::bad_alloc(); }
#define NO_ROWS(name, Args) void name(const Args&, int64_t, int64_t) {}
#define NO_PART(name, Args) void name(const Args&, const Team&) {}
NO_ROWS(rotary_rows, RotaryArgs)
NO_ROWS(store_kv, StoreKVArgs)
NO_ROWS(pack_rows, PackRowsArgs)
NO_ROWS(add_rows, AddArgs)
NO_ROWS(route_rows, RouteArgs)
NO_ROWS(combine_rows, CombineArgs)
NO_ROWS(clamp_rows, ClampArgs)
NO_ROWS(layer_norm_rows, LayerNormArgs)
NO_ROWS(gelu_rows, GeluArgs)
NO_PART(attention_part, AttentionArgs)
NO_PART(linear_part, LinearArgs)
NO_PART(sort_experts_part, SortExpertsArgs)
NO_PART(likeliest_part, LikeliestArgs)
}  // namespace octavo
extern "C" void nested_run(const octavo::Instruction* program, int64_t count, int64_t num_threads) {
  octavo::run_team(2, [&](int64_t rank, int64_t) {
    if (rank == 0) octavo_run(program, count, num_threads);
  });
}
"""


@pytest.fixture(scope="module")
def program_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The real program runner over ops that only count."""
    folder = tmp_path_factory.mktemp("program")
    for path in cpu_build.SOURCES.glob("cpu_*.h"):
        shutil.copy(path, folder)
    shutil.copy(cpu_build.SOURCES / "cpu_program.cpp", folder)
    (folder / "cpu_chain.cpp").write_text(CHAIN)
    result = load_library(cache_dir=folder / "cache", sources=folder)
    assert result.library is not None, result.detail
    return result.library


class Chain:
    """A program of `length` counting ops. Row i of cells is written by op i, which reads row i - 1."""

    def __init__(self, length: int = 200, pieces: int = 33) -> None:
        self.cells = (ctypes.c_int64 * (pieces * (length + 1)))()
        self.count = ctypes.c_int64(pieces)
        self.steps: list[cpu_structs.Args] = [
            cpu_structs.SampleArgs(
                num_rows=ctypes.addressof(self.count),
                vocab_size=int(index > 0),
                out=ctypes.addressof(self.cells) + index * pieces * 8,
            )
            for index in range(length)
        ]

    def clear(self) -> None:
        self.cells[:] = [0] * len(self.cells)

    def check(self) -> None:
        pieces = self.count.value
        assert list(self.cells[pieces:]) == [1] * (len(self.cells) - pieces)


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3, 5])
def test_ops_of_a_program_run_in_order_and_every_piece_once(
    num_threads: int, program_library: ctypes.CDLL
) -> None:
    chain = Chain()
    for _ in range(3):
        chain.clear()
        cpu_structs.run(program_library, chain.steps, num_threads)
        chain.check()


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 33])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_ops_that_do_each_token_by_itself_do_all_of_them_in_order(
    num_threads: int, num_tokens: int, program_library: ctypes.CDLL
) -> None:
    """Neighbours share a run; a sample op in the middle, which does nothing here, ends it."""
    cells = (ctypes.c_float * 40)()
    count, nothing = ctypes.c_int64(num_tokens), ctypes.c_int64(0)
    address = {"num_tokens": ctypes.addressof(count), "out": ctypes.addressof(cells)}
    steps = [
        cpu_structs.GateArgs(kind=0, **address),
        cpu_structs.EmbedArgs(dtype=1, **address),
        cpu_structs.GateArgs(kind=2, **address),
        cpu_structs.SampleArgs(num_rows=ctypes.addressof(nothing)),
        cpu_structs.EmbedArgs(dtype=3, **address),
    ]
    cpu_structs.run(program_library, steps, num_threads)
    assert list(cells) == [4.0] * num_tokens + [0.0] * (40 - num_tokens)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_op_that_finds_no_memory_ends_its_program(
    num_threads: int, program_library: ctypes.CDLL
) -> None:
    chain = Chain()
    norm = cpu_structs.RmsNormArgs(num_tokens=ctypes.addressof(chain.count))
    steps = [*chain.steps[:1], norm, *chain.steps[1:]]
    with pytest.raises(MemoryError, match="native ops found no memory"):
        cpu_structs.run(program_library, steps, num_threads)
    assert sum(chain.cells) == chain.count.value
    chain.clear()
    cpu_structs.run(program_library, chain.steps, num_threads)
    chain.check()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_program_runs_within_a_parallel_region(
    num_threads: int, program_library: ctypes.CDLL
) -> None:
    chain = Chain()
    program = cpu_structs.program(chain.steps)
    address, count = ctypes.addressof(program), ctypes.c_int64(len(program))
    program_library.nested_run(ctypes.c_void_p(address), count, ctypes.c_int64(num_threads))
    chain.check()


def test_several_threads_run_programs_at_once(program_library: ctypes.CDLL) -> None:
    chains = [Chain() for _ in range(4)]

    def run(chain: Chain) -> None:
        for num_threads in (2, 1, 3, 2) * 5:
            chain.clear()
            cpu_structs.run(program_library, chain.steps, num_threads)
            chain.check()

    with ThreadPoolExecutor(len(chains)) as pool:
        list(pool.map(run, chains))


def test_forked_process_runs_programs_alone(program_library: ctypes.CDLL) -> None:
    """libgomp's threads are not forked, and it would wait for them."""
    chain = Chain()
    cpu_structs.run(program_library, chain.steps, 2)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends a child that waits
        chain.clear()
        cpu_structs.run(program_library, chain.steps, 2)
        os._exit(int(sum(chain.cells) != len(chain.cells) - chain.count.value))
    assert os.waitpid(child, 0) == (child, 0)


def test_live_cells_are_read_at_every_run(program_library: ctypes.CDLL) -> None:
    cells = (ctypes.c_int64 * 20)()
    count = ctypes.c_int64(3)
    step = cpu_structs.SampleArgs(
        num_rows=ctypes.addressof(count), vocab_size=0, out=ctypes.addressof(cells)
    )
    program = cpu_structs.program([step])
    program_library.octavo_run(ctypes.addressof(program), 1, 2)
    assert sum(cells) == 3
    cells[:] = [0] * 20
    count.value = 9
    program_library.octavo_run(ctypes.addressof(program), 1, 2)
    assert sum(cells) == 9


def test_structs_are_laid_out_as_in_c(program_library: ctypes.CDLL) -> None:
    entries = ctypes.POINTER(cpu_structs.LayoutEntry)()
    count = program_library.octavo_layout(ctypes.byref(entries))
    in_c = {
        entries[index].name.decode(): (entries[index].offset, entries[index].size)
        for index in range(count)
    }
    assert len(in_c) == count
    assert layout_in_python() == in_c


def layout_in_python() -> dict[str, tuple[int, int]]:
    structs: Sequence[type[ctypes.Structure]] = [
        *cpu_structs.Args.__subclasses__(),
        cpu_structs.Instruction,
    ]
    layout = {
        f"OpKind.k{kind.name.title().replace('_', '').replace('Kv', 'KV')}": (int(kind), 0)
        for kind in cpu_structs.OpKind
    }
    for struct in structs:
        layout[struct.__name__] = (0, ctypes.sizeof(struct))
        for name, *_ in struct._fields_:
            field = getattr(struct, name)
            layout[f"{struct.__name__}.{name}"] = (field.offset, field.size)
    return layout
