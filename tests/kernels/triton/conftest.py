"""Tests of the Triton kernels on a CPU, under Triton's interpreter, in a process of their own.

``@triton.jit`` decides when a module is imported whether its kernels are interpreted. So these files are
collected only where ``TRITON_INTERPRET=1`` was set before the process began:

    TRITON_INTERPRET=1 pytest tests/kernels/triton

Without it, ``tests/kernels/test_triton_interpreted.py`` runs them in such a process.
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "tests/kernels/triton is left out here: it needs TRITON_INTERPRET=1"
    return None


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_interpreted() -> None:
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    assert triton.knobs.runtime.interpret
    assert isinstance(triton.jit(lambda: None), InterpretedFunction)
