"""The official Node SDK: each file of ``node/`` is run by Node's own test runner."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).resolve().parent / "node"
ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
SCENARIOS = sorted(NODE.glob("*.test.mjs"))


@pytest.fixture(scope="module")
def node() -> str:
    """Node as package.json asks for it, since the SDK wants one newer than many systems have."""
    name = f"node-linux-{ARCHITECTURES.get(platform.machine(), 'none')}"
    shipped = NODE / "node_modules" / name / "bin" / "node"
    found = str(shipped) if shipped.exists() else shutil.which("node")
    assert found, "no node: npm ci in tests/clients/node"
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(node: str, scenario: Path, base_url: str, api_key: str) -> None:
    run = subprocess.run(
        [node, "--test", "--test-reporter=tap", str(scenario)],
        cwd=NODE,
        env={**os.environ, "BASE_URL": base_url, "API_KEY": api_key},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    counts = dict(re.findall(r"^# (\w+) (\d+)$", run.stdout, re.MULTILINE))
    assert (counts["fail"], counts["cancelled"], counts["skipped"]) == ("0", "0", "0")
    assert int(counts["pass"]) > 0
