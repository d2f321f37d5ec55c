"""The script for GPU machines: it runs here on the CPU, interpreted, and reports what fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = "card,twins,kernels,attention,steps"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "benchmarks" / "gpu_check.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=550,
    )


@pytest.mark.slow
@pytest.mark.parametrize("sections", [SECTIONS, "answers,offline"])
def test_a_dry_run_does_everything(sections: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run = _run("--dry-run", "--sections", sections, "--json", str(tmp_path / "report.json"))
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    text, *table = run.stdout.splitlines()
    assert json.loads(text) == report
    assert report["dry_run"]
    assert list(report["sections"]) == sections.split(",")
    for name, section in report["sections"].items():
        assert section["status"] == "ok"
        assert section["rows"]
        for row in section["rows"]:
            assert any(line.startswith(name) and row["name"] in line for line in table)


def test_a_section_that_fails_is_reported_and_the_next_one_runs() -> None:
    """Without --dry-run and without a GPU, every section fails."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which the sections would run")
    run = _run("--sections", "card,twins")
    assert run.returncode == 1
    report = json.loads(run.stdout.splitlines()[0])
    for name in ("card", "twins"):
        assert report["sections"][name]["status"] == "failed"
        assert "sees no GPU" in report["sections"][name]["error"]
    assert run.stdout.count("FAILED") == 2


def test_a_section_that_hangs_is_ended_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    check = _load("gpu_check")

    def hang(command: list[str], timeout: float, **_options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout, stderr=b"compiling")

    monkeypatch.setattr(check.subprocess, "run", hang)
    report = check._in_child("twins", 9.0, False, None)
    assert report["status"] == "timeout"
    assert "more than 9 s; compiling" in report["error"]
    assert check._in_child("twins", 1.0, False, None)["status"] == "left out"
    assert "TIMEOUT" in check._table({"twins": report})


def test_an_unknown_section_is_refused() -> None:
    run = _run("--sections", "card,nothing")
    assert run.returncode == 2
    assert "no section nothing" in run.stderr


def test_the_sections_fit_their_time() -> None:
    check = _load("gpu_check")
    assert check.TOTAL_S < 8 * 60
    assert all((ROOT / "benchmarks" / "gpu" / f"{name}.py").exists() for name in check.LIMITS_S)


def test_floors_are_what_the_shapes_say() -> None:
    """By hand: Llama-3-8B has 8.03e9 parameters, of which a decode step reads all but the embedding."""
    roofline = _load("roofline")
    llama = roofline.SHAPES["Llama-3-8B"]
    one = roofline.step(llama, [(1, 1)])
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    assert weights < one.num_bytes < 1.001 * weights
    assert one.flops == pytest.approx(weights, rel=1e-3)
    kv_token = 2 * 32 * 8 * 128 * 2
    longer = roofline.step(llama, [(1001, 1)])
    assert longer.num_bytes - one.num_bytes == 1000 * kv_token
    prompt = roofline.attention(llama, [(100, 100)])
    assert prompt.flops == 4 * 32 * 128 * 100 * 101 / 2
    for card in roofline.CARDS.values():
        assert one.floor_s(card) == one.num_bytes / card.bytes_per_s
        assert one.bound(card) == "memory"
