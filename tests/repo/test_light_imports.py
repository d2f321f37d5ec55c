"""The front end and the control plane start fast: neither torch nor transformers comes with them."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = (
    "octavo",
    "octavo.engine.api",
    "octavo.engine.config",
    "octavo.engine.step",
    "octavo.engine.stats",
    "octavo.engine.checkpoint.checkpoint",
    "octavo.engine.text.tokenizer",
    "octavo.engine.memory",
    "octavo.engine.scheduling",
    "octavo.engine.models.families",
    "octavo.engine.service.client",
    "octavo.engine.build",
    "octavo.server.app",
    "octavo.server.cli",
    "octavo.server.launch",
)
PARENTS = (
    "octavo.engine.config",
    "octavo.engine.memory",
    "octavo.engine.scheduling",
    "octavo.engine.models.families",
)
HEAVY = ("torch", "transformers", "triton", "gguf")


def test_light_modules_bring_in_nothing_heavy() -> None:
    """One process imports all of them in turn, so that a failure names the first culprit."""
    code = (
        f"import importlib, pkgutil, sys\nPARENTS = {PARENTS!r}\n"
        "def check(name):\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
        f"for name in {LIGHT!r}:\n"
        "    module = importlib.import_module(name); check(name)\n"
        "    for _, child, _ in pkgutil.iter_modules(getattr(module, '__path__', ())):\n"
        "        if name in PARENTS:\n"
        "            importlib.import_module(f'{name}.{child}'); check(f'{name}.{child}')\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "name",
    [
        *("LLM", "SamplingParams", "RequestOutput", "FinishReason"),
        *("BeamSearchParams", "BeamSearchOutput", "BeamSearchSequence"),
    ],
)
def test_public_names_resolve_lazily(name: str) -> None:
    import octavo

    assert name in dir(octavo)
    assert getattr(octavo, name).__name__ == name


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import octavo

    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        _ = octavo.Server
