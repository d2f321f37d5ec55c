"""Every metric and label that an alert, a dashboard or the autoscaler reads is one that the server exposes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Unknown = Callable[[str], list[str]]


def test_the_check_itself_finds_names_and_labels(unknown_of: Unknown) -> None:
    good = (
        'sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{le="x{"}[5m])) / 1e3 and up == 1'
    )
    assert unknown_of(good) == []
    assert unknown_of("rate(vllm:nothing_total[5m])") == ["vllm:nothing_total"]
    assert unknown_of("vllm:time_to_first_token_seconds") == ["vllm:time_to_first_token_seconds"]
    assert unknown_of("1 - nothing / octavo:steps_total") == ["nothing"]
    assert unknown_of('octavo:steps_total{kind="x"}') == ["octavo:steps_total.kind"]
    assert unknown_of("sum by (kind, nothing) (octavo:preemptions_total)") == ["nothing"]


def test_alerts(rules: list[dict[str, Any]], unknown_of: Unknown) -> None:
    assert {rule["alert"]: unknown_of(rule["expr"]) for rule in rules} == {
        rule["alert"]: [] for rule in rules
    }


def test_dashboards(dashboard_queries: list[tuple[str, str]], unknown_of: Unknown) -> None:
    assert len(dashboard_queries) > 50
    unknown = [(where, found) for where, expr in dashboard_queries if (found := unknown_of(expr))]
    assert unknown == []


def test_autoscaler(deploy: Path, unknown_of: Unknown) -> None:
    scaled = yaml.safe_load((deploy / "autoscaling" / "scaled-object.yaml").read_text())
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert len(queries) == 2
    assert [unknown_of(query) for query in queries] == [[], []]


def test_dashboards_are_well_formed(dashboards: dict[str, dict[str, Any]]) -> None:
    assert set(dashboards) == {"service.json", "engine.json", "memory.json"}
    assert len({dashboard["uid"] for dashboard in dashboards.values()}) == 3
    for dashboard in dashboards.values():
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert [
            panel["title"] for panel in panels if panel["type"] != "row" and not _reads(panel)
        ] == []
        cells = [cell for panel in panels for cell in _cells(panel["gridPos"])]
        assert len(set(cells)) == len(cells), "panels lie on each other"
        assert max(x for x, _ in cells) < 24


def _reads(panel: dict[str, Any]) -> bool:
    """Whether a panel asks the source that is chosen above, and says what it shows."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = panel["targets"]
    return bool(
        targets
        and panel["description"]
        and all(target["datasource"] == source for target in targets)
    )


def _cells(position: dict[str, int]) -> list[tuple[int, int]]:
    columns = range(position["x"], position["x"] + position["w"])
    rows = range(position["y"], position["y"] + position["h"])
    return [(x, y) for x in columns for y in rows]


@pytest.mark.parametrize("name", ["service.json", "engine.json", "memory.json"])
def test_kustomize_ships_every_dashboard(deploy: Path, name: str) -> None:
    component = yaml.safe_load((deploy / "monitoring" / "kustomization.yaml").read_text())
    assert f"dashboards/{name}" in component["configMapGenerator"][0]["files"]
