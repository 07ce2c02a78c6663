"""Alerts fire on what they are about, say where to read on, and name only what the worker exposes."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.queries import ALERTS, alert_expressions, names_in, undeclared
from tests.servers.programs import prometheus_program

ROOT = Path(__file__).parents[2]
GROUPS: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
NAMES = [rule["alert"] for rule in RULES if "alert" in rule]
CASES = Path(__file__).with_name("alerts_test.yml")


def promtool(*arguments: str | Path) -> str:
    command = [prometheus_program("promtool"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=CASES.parent)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "config", ROOT / "deploy/prometheus/prometheus.yml")
    assert f"{len(RULES)} rules found" in promtool("check", "rules", ALERTS)


def test_alerts_fire_on_what_they_are_about_and_on_nothing_else() -> None:
    promtool("test", "rules", CASES)


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_every_alert_says_how_urgent_it_is_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert rule["alert"] in headings


def test_every_alert_is_tested_both_ways() -> None:
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    fires: dict[str, set[bool]] = defaultdict(set)
    for case in cases:
        for expected in case["alert_rule_test"]:
            fires[expected["alertname"]].add(bool(expected["exp_alerts"]))
    assert fires == {name: {True, False} for name in NAMES}


def test_runbooks_are_only_about_alerts_that_exist() -> None:
    operating = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^#+ (TicketRouter\w+)$", operating, re.MULTILINE)) == sorted(NAMES)


@pytest.mark.parametrize("expression", alert_expressions())
def test_alerts_name_only_metrics_and_labels_that_are_declared(expression: str) -> None:
    assert names_in(expression) or re.search(r"\bup\{job=\"ticket-router", expression)
    assert not undeclared(expression)


def test_an_undeclared_name_would_be_found() -> None:
    assert undeclared("sum by (job) (ticket_router_settled_totals)") == {"ticket_router_settled_totals"}
    assert undeclared('ticket_router_decisions_total{acton="route"}') == {"acton"}
    assert undeclared("sum by (job, topic) (ticket_router_settled_total)") == {"topic"}
    assert not undeclared("sum by (le) (rate(ticket_router_label_mass_bucket[5m]))")
