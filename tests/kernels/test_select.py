"""The choice of an op set."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from octavo.kernels.select import BACKENDS, select_ops


def test_every_backend_gives_ops() -> None:
    names = {backend: select_ops(backend, torch.device("cpu")).name for backend in BACKENDS}
    assert names == {"auto": "torch", "torch": "torch", "reference": "reference"}


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
