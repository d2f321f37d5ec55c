"""The compose file: real options, a container that may write to /tmp only, and files that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.server.cli import resolve
from octavo.server.launch import CLOSE_TIMEOUT_S, FLUSH_TIMEOUT_S

VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


@pytest.fixture(scope="module")
def services(deploy: Path) -> dict[str, Any]:
    """Services by name, their variables at their defaults."""
    text = (deploy / "compose.yaml").read_text()
    content = yaml.safe_load(VARIABLE.sub(lambda match: match[2], text))
    assert set(content) == {"name", "services", "volumes"}
    found: dict[str, Any] = content["services"]
    named = {v.split(":")[0] for service in found.values() for v in service.get("volumes", ())}
    assert {name for name in named if not name.startswith(".")} == set(content["volumes"])
    return found


def test_arguments_are_real_options(services: dict[str, Any]) -> None:
    service = services["octavo"]
    _, server = resolve(shlex.split(service["command"]))
    assert server.drain_delay > 0
    assert server.shutdown_timeout > 0
    grace = float(service["stop_grace_period"].removesuffix("s"))
    needed = server.drain_delay + server.shutdown_timeout + CLOSE_TIMEOUT_S + FLUSH_TIMEOUT_S
    assert needed <= grace


def test_further_arguments_may_be_given(deploy: Path) -> None:
    command = re.search(r"command: (.+)", (deploy / "compose.yaml").read_text())
    assert command is not None
    given = VARIABLE.sub("--model /models/name --max-num-seqs 4", command[1])
    engine, _ = resolve(shlex.split(given))
    assert engine.model.model == "/models/name"


def test_the_container_is_restricted(services: dict[str, Any]) -> None:
    service = services["octavo"]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].split(":")[0]) > 0
    assert service["environment"]["HF_HUB_OFFLINE"] == "1"
    assert [v for v in service["volumes"] if not v.endswith(":ro")] == []


def test_ports_are_open_to_this_machine_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service["ports"]]
    assert len(ports) == 3
    assert all(str(port).startswith("127.0.0.1:") for port in ports)


def test_mounted_files_exist(deploy: Path, services: dict[str, Any]) -> None:
    mounted = [v.split(":")[0] for service in services.values() for v in service["volumes"]]
    files = [name for name in mounted if name.startswith(".")]
    assert len(files) == 5
    assert [name for name in files if not (deploy / name).exists()] == []


def test_prometheus_finds_the_server_and_the_rules(
    deploy: Path, services: dict[str, Any], tmp_path: Path, run_tool: Callable[..., str]
) -> None:
    config = yaml.safe_load((deploy / "compose" / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    ((host, port),) = [target.split(":") for target in job["static_configs"][0]["targets"]]
    assert host in services
    assert services[host]["ports"][0].endswith(f":{port}")
    for volume in services["prometheus"]["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            (tmp_path / Path(target).name).write_text((deploy / source).read_text())
    run_tool("promtool", "check", "config", tmp_path / "prometheus.yml")
