"""Tests that compile the Triton kernels for real GPUs, without one.

``octavo.kernels.triton_aot`` takes the launches from the launchers themselves. Nothing here is collected
in a process whose kernels are interpreted (see ``tests/kernels/triton/conftest.py``).
"""

from __future__ import annotations

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
