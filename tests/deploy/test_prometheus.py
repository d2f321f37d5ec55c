"""A real Prometheus scrapes a real server: the rules are evaluated, every dashboard's query finds data."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

LIMIT_S = 60
JOB_LABELS = {"namespace": "octavo", "pod": "octavo-0"}
"""What the operator adds to a pod's samples."""


class Prometheus:
    """A running one."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=10)

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        body = answer.json()
        assert body["status"] == "success", f"{parameters}: {body}"
        return body["data"]

    def numbers(self, query: str) -> list[float]:
        """The values of an instant vector, without those that are no number."""
        values = [float(sample["value"][1]) for sample in self.get("query", query=query)["result"]]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def _prometheus(folder: Path) -> Iterator[Prometheus]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus", "--config.file=prometheus.yaml", f"--web.listen-address={address}"]
    command += ["--storage.tsdb.path=data", "--log.level=warn"]
    process = subprocess.Popen(command, cwd=folder)
    try:
        _wait_for(lambda: _answers(f"http://{address}/-/ready"), process)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, "Prometheus ended"
        assert time.monotonic() < deadline, "Prometheus does not answer"
        time.sleep(0.1)


def _configure(deploy: Path, folder: Path, target: str) -> None:
    """The shipped configuration, with another target and shorter intervals."""
    config = yaml.safe_load((deploy / "compose" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target], "labels": JOB_LABELS}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(deploy / "monitoring" / "rules.yaml", folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model of the service's tests."""
    path = Path(__file__).parents[1] / "service" / "conftest.py"
    spec = importlib.util.spec_from_file_location("octavo_service_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.write_model(tmp_path_factory.mktemp("models") / "tiny")
    return folder


def _talk(url: str, number: int) -> None:
    """Prompts that are found in the cache, and others that push cached blocks out of it."""
    for prompt in (
        "the same words again and again, longer than a block",
        f"{number}: " + 200 * "x",
    ):
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "n": 2},
            timeout=30,
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_rules_are_evaluated_and_every_query_finds_data(
    deploy: Path,
    rules: list[dict[str, Any]],
    dashboard_queries: list[tuple[str, str]],
    model: Path,
    start_server: Callable[..., Any],
    demand_tool: Callable[[str], None],
    tmp_path: Path,
) -> None:
    demand_tool("prometheus")
    scaled = yaml.safe_load((deploy / "autoscaling" / "scaled-object.yaml").read_text())
    missing = [(where, _filled(query)) for where, query in dashboard_queries]
    missing += [("autoscaler", t["metadata"]["query"]) for t in scaled["spec"]["triggers"]]
    with start_server(str(model), "--num-gpu-blocks-override", "48") as server:
        _configure(deploy, tmp_path, server.url.removeprefix("http://"))
        with _prometheus(tmp_path) as prometheus:
            deadline, number = time.monotonic() + LIMIT_S, 0
            while missing and time.monotonic() < deadline:
                _talk(server.url, number)
                number += 1
                missing = [(where, q) for where, q in missing if not prometheus.numbers(q)]
            assert missing == []
            _check_rules(prometheus, rules)


def _filled(query: str) -> str:
    """A dashboard's query as Grafana sends it with all models and instances chosen."""
    filled = re.sub(r"\$(?:model_name|instance)\b", ".*", query).replace("$__rate_interval", "20s")
    assert "$" not in filled
    return filled


def _check_rules(prometheus: Prometheus, rules: list[dict[str, Any]]) -> None:
    """All are loaded and evaluated without an error, and nothing is wrong with the server."""
    loaded = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in rules]
    assert {rule["name"]: rule["health"] for rule in loaded if rule["health"] != "ok"} == {}
    assert {rule["name"]: rule["state"] for rule in loaded if rule["state"] != "inactive"} == {}
