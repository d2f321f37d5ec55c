"""The choice of an op set."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from octavo.kernels.cpu_build import NativeLibrary
from octavo.kernels.select import BACKENDS, select_ops


@pytest.mark.native
def test_every_backend_gives_ops() -> None:
    names = {backend: select_ops(backend, torch.device("cpu")).name for backend in BACKENDS}
    assert names == {"auto": "cpu", "cpu": "cpu", "torch": "torch", "reference": "reference"}


def test_without_a_compiler_torch_serves_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "octavo.kernels.select.load_library",
        lambda **_options: NativeLibrary(None, "no C++ compiler"),
    )
    assert select_ops("auto", torch.device("cpu")).name == "torch"
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        select_ops("cpu", torch.device("cpu"))


def test_the_native_kernels_run_on_cpus_only() -> None:
    assert select_ops("auto", torch.device("cuda")).name == "torch"
    with pytest.raises(ValueError, match="cuda"):
        select_ops("cpu", torch.device("cuda"))


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="flash"):
        select_ops("flash", torch.device("cpu"))


@pytest.mark.slow
def test_kernels_import_nothing_else_of_octavo() -> None:
    code = (
        "import sys, octavo.kernels.select\n"
        "bad = [m for m in sys.modules if m.startswith(('octavo.engine', 'octavo.server'))]\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)
