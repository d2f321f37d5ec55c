"""Files of deploy/, the tools that read them, and what the server really exposes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.api import Engine
from octavo.server.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
OF_PROMETHEUS = {"up": {"job", "instance"}}
TARGET_LABELS = {"job", "instance", "namespace", "pod"}
"""Prometheus and its operator add these to every sample."""


@pytest.fixture(scope="session")
def deploy() -> Path:
    """The folder."""
    return ROOT / "deploy"


@pytest.fixture(scope="session")
def run_tool() -> Callable[..., str]:
    """Run kubectl or promtool. Without it the test is skipped; in CI it fails."""

    def run(name: str, *arguments: str | Path) -> str:
        demand(name)
        done = subprocess.run([name, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert done.stderr == "", done.stderr
        return done.stdout

    return run


def demand(name: str) -> None:
    """Return if the program is installed."""
    if shutil.which(name) is None:
        reason = f"needs {name}; .ci/run says which package has it"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def demand_kustomize() -> None:
    """Return if kubectl has Kustomize 3.7 or later. Debian 12's has 2, which knows no components."""
    demand("kubectl")
    version = subprocess.run(
        ["kubectl", "version", "--client", "--output=json"], capture_output=True, text=True
    )
    minor = int(re.sub(r"\D", "", json.loads(version.stdout)["clientVersion"]["minor"]))
    if minor < 21:
        pytest.skip(f"kubectl 1.{minor} has Kustomize 2; 1.21 or later is needed")


@pytest.fixture(scope="session")
def demand_tool() -> Callable[[str], None]:
    return demand


@pytest.fixture(scope="session")
def rendered(deploy: Path, run_tool: Callable[..., str]) -> Callable[[str], list[dict[str, Any]]]:
    """``rendered("cpu")``: the documents of an overlay, as ``kubectl kustomize`` prints them."""

    @cache
    def render(overlay: str) -> list[dict[str, Any]]:
        demand_kustomize()
        text = run_tool("kubectl", "kustomize", deploy / "overlays" / overlay)
        return list(yaml.safe_load_all(text))

    return render


@pytest.fixture(scope="session")
def rules(deploy: Path) -> list[dict[str, Any]]:
    """Every alerting rule that is shipped."""
    content = yaml.safe_load((deploy / "monitoring" / "rules.yaml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


@pytest.fixture(scope="session")
def dashboards(deploy: Path) -> dict[str, dict[str, Any]]:
    """File name to content."""
    paths = sorted((deploy / "monitoring" / "dashboards").glob("*.json"))
    return {path.name: json.loads(path.read_text()) for path in paths}


@pytest.fixture(scope="session")
def dashboard_queries(dashboards: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """``(where, PromQL)`` of every panel and variable, with Grafana's variables still in it."""
    return [
        (f"{name}: {where}", expr)
        for name, dashboard in dashboards.items()
        for where, expr in _queries(dashboard)
    ]


def _queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert found is not None, variable
            yield variable["name"], f"count by ({found[2]}) ({found[1]})"


@pytest.fixture(scope="session")
def exposed() -> dict[str, set[str]]:
    """Every sample of a scrape of a ready server, by name: its labels. Taken from the text it sends."""
    info = SimpleNamespace(
        max_model_len=8192,
        block_size=16,
        num_blocks=1024,
        num_kv_tokens=16384,
        kv_concurrency=2.0,
        num_host_blocks=0,
        kv_cache_bytes=1 << 20,
        enable_prefix_caching=True,
        dtype="float32",
    )
    metrics = Metrics(cast(Engine, SimpleNamespace(info=info)), "model")
    metrics.http.observe("/v1/completions", "POST", 200, 0.0)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(?<![\w:.$])([a-zA-Z_:][\w:]*+)(?!\s*\()(?:\{([^}]*)\})?")
_WORDS = {"and", "or", "unless", "offset", "bool"}


def unknown_names(expr: str, exposed: dict[str, set[str]]) -> list[str]:
    """Metrics of a PromQL expression that are not exposed, and labels that theirs do not have."""
    known = {**exposed, **OF_PROMETHEUS}
    expr = _STRING.sub('""', expr)
    expr = re.sub(r"\[[^\]]*\]", "", expr)
    every_label = set[str]().union(*known.values(), TARGET_LABELS)
    grouped = [label.strip() for group in _GROUPING.findall(expr) for label in group.split(",")]
    unknown = [label for label in grouped if label not in every_label]
    for name, matchers in _SELECTOR.findall(_GROUPING.sub(" ", expr)):
        if name in _WORDS:
            continue
        if name not in known:
            unknown.append(name)
            continue
        labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
        unknown += [f"{name}.{x}" for x in labels if x not in known[name] | TARGET_LABELS]
    return unknown


@pytest.fixture(scope="session")
def unknown_of(exposed: dict[str, set[str]]) -> Callable[[str], list[str]]:
    """Names in a query that the server does not have."""
    return lambda expr: unknown_names(expr, exposed)
