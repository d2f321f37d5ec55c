"""Runs ``tests/kernels/triton`` in a process whose kernels are interpreted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("triton")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton's interpreter"
)


def _run(chosen: str, timeout_s: float) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen]
    # One thread: the interpreter is bound by Python, and its small tensors gain nothing from more.
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        # NumPy's products stand in for the GPU's. Those for AVX2 round a row by how many rows there are.
        "OPENBLAS_CORETYPE": "Prescott",
    }
    run = subprocess.run(
        [*command, str(FOLDER)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if run.returncode != 0:
        pytest.fail(run.stdout[-20_000:], pytrace=False)


@pytest.mark.smoke
def test_first_look() -> None:
    _run("smoke", 300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_everything_else() -> None:
    _run("not smoke", 1100)
