"""The choice of an op set."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from octavo.kernels.cpu_build import NativeLibrary
from octavo.kernels.select import BACKENDS, select_ops


@pytest.mark.native
def test_every_backend_gives_ops() -> None:
    on_cpus = [backend for backend in BACKENDS if backend != "triton"]
    names = {backend: select_ops(backend, torch.device("cpu")).name for backend in on_cpus}
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


CUDA = torch.device("cuda")


class _Properties(NamedTuple):
    major: int
    minor: int
    gcnArchName: str = ""
    multi_processor_count: int = 108


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``gpu(major, minor)``: torch sees a GPU of that compute capability."""

    pytest.importorskip("triton")

    def see(major: int, minor: int, hip: str | None = None, arch: str = "") -> None:
        monkeypatch.setattr("octavo.kernels.triton_ops.TritonOps.check", lambda self: None)
        monkeypatch.setattr(torch.version, "hip", hip)
        for name, value in {
            "is_available": True,
            "get_device_capability": (major, minor),
            "get_device_name": "GeForce",
            "get_device_properties": _Properties(major, minor, arch),
            "current_device": 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_args, value=value: value)

    return see


def test_a_gpu_is_served_by_triton(
    gpu: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    gpu(9, 0)
    assert select_ops("auto", CUDA).name == select_ops("triton", CUDA).name == "triton"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (None, "PyTorch has no GPU for cuda"),
        ((7, 5), "GeForce has compute capability 7.5, and they need 8.0"),
        ((9, 0, "6.4", "gfx1100:sramecc+"), "not made for gfx1100"),
        ("no triton", "Triton is not installed"),
        ("broken triton", "Triton cannot be imported .*libcuda"),
    ],
)
def test_where_triton_cannot_run_torch_serves_and_one_line_says_why(
    seen: Any,
    reason: str,
    gpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(name: str) -> None:
        raise ImportError("libcuda.so.1 is missing")

    if isinstance(seen, tuple):
        gpu(*seen)
    elif seen == "no triton":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    elif seen == "broken triton":
        monkeypatch.setattr(importlib, "import_module", broken)
    assert select_ops("auto", CUDA).name == "torch"
    (record,) = caplog.records
    assert re.search(reason, record.getMessage())
    assert "PyTorch computes instead" in record.getMessage()
    with pytest.raises(ValueError, match=reason):
        select_ops("triton", CUDA)


def test_a_kernel_that_does_not_start_is_a_reason(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from octavo.kernels.triton_ops import TritonOps

    def refuse(self: TritonOps) -> None:
        raise ValueError("a kernel does not start (Failed to find C compiler)")

    gpu(9, 0)
    monkeypatch.setattr(TritonOps, "check", refuse)
    assert select_ops("auto", CUDA).name == "torch"
    (record,) = caplog.records
    assert "Failed to find C compiler" in record.getMessage()


def test_what_keeps_a_kernel_from_starting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from octavo.kernels.triton_gpu import ARCHITECTURES, Gpu
    from octavo.kernels.triton_ops import TritonOps

    def fail(*_args: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("octavo.kernels.triton_norm.rms_norm", fail)
    with pytest.raises(ValueError, match=r"does not start .*C compiler"):
        TritonOps(torch.device("cpu"), Gpu(ARCHITECTURES["sm_90"], 4)).check()


def test_amd_is_said_to_be_untested(
    gpu: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    gpu(9, 4, "6.4", "gfx942:sramecc+:xnack-")
    assert select_ops("auto", CUDA).name == "triton"
    (record,) = caplog.records
    assert "untested" in record.getMessage()


def test_triton_on_a_cpu_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="the device is the CPU"):
        select_ops("triton", torch.device("cpu"))


@pytest.mark.slow
def test_a_cpu_start_does_not_import_triton() -> None:
    code = (
        "import sys, torch\n"
        "from octavo.kernels.select import select_ops\n"
        "for backend in ('torch', 'reference'): select_ops(backend, torch.device('cpu'))\n"
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_the_native_kernels_run_on_cpus_only() -> None:
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
