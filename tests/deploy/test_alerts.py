"""Alerts: valid, each with a case in which it fires, one in which it does not, and a page on what to do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

CASES = Path(__file__).parent / "alert_cases.yaml"
HEADINGS = ["Meaning", "Look", "Do"]
PAGE_LINES = 50


def test_promtool_accepts_the_rules(deploy: Path, run_tool: Callable[..., str]) -> None:
    run_tool("promtool", "check", "rules", deploy / "monitoring" / "rules.yaml")


def test_alerts_fire_when_they_should_and_only_then(run_tool: Callable[..., str]) -> None:
    run_tool("promtool", "test", "rules", CASES)


def test_every_alert_has_a_case_of_each_kind(rules: list[dict[str, Any]]) -> None:
    """Silent at some moment, firing at another; what fires is compared as a whole, so quiet neighbours count."""
    kinds: dict[str, set[bool]] = defaultdict(set)
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for one in case["alert_rule_test"]:
            kinds[one["alertname"]].add(bool(one["exp_alerts"]))
    assert kinds == {rule["alert"]: {True, False} for rule in rules}


def test_the_operators_rules_are_the_same(deploy: Path) -> None:
    plain = yaml.safe_load((deploy / "monitoring" / "rules.yaml").read_text())
    of_operator = yaml.safe_load((deploy / "monitoring" / "prometheus-rule.yaml").read_text())
    assert of_operator["spec"] == plain


def test_every_alert_has_a_runbook_of_a_page(deploy: Path, rules: list[dict[str, Any]]) -> None:
    pages: dict[str, list[str]] = defaultdict(list)
    for rule in rules:
        pages[rule["annotations"]["runbook"]].append(rule["alert"])
    assert set(pages) == {f"deploy/runbooks/{p.name}" for p in (deploy / "runbooks").iterdir()}
    for path, alerts in pages.items():
        text = (deploy.parent / path).read_text()
        assert len(text.splitlines()) <= PAGE_LINES, path
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS, path
        assert [alert for alert in alerts if alert not in text] == []


def test_every_alert_says_how_urgent_it_is(rules: list[dict[str, Any]]) -> None:
    assert {rule["labels"]["severity"] for rule in rules} == {"critical", "warning"}
    assert len({rule["alert"] for rule in rules}) == len(rules)
