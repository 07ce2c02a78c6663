"""The queries of alerts and dashboard, and which metrics and labels they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from worker.telemetry import METRICS
from worker.telemetry.names import prometheus_name

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "ticket-router.json"

BY_PROMETHEUS = {"job", "instance", "le"}
PARTS = {"_bucket", "_sum", "_count"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_expressions() -> list[str]:
    """Those of the recording rules too."""
    return [rule["expr"] for rule in rules()]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def names_in(expression: str) -> set[str]:
    """Metrics of the worker, as they stand in the query, and records made of them."""
    return set(re.findall(r"(?:(?:job|instance):)?\bticket_router_\w+(?::\w+)?", expression))


def labels_in(expression: str) -> set[str]:
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = re.findall(r"\b(?:by|on|ignoring|without|group_left)\s*\(([^)]*)\)", expression)
    return {*matched, *(name.strip() for group in grouped for name in group.split(",") if name.strip())}


def undeclared(expression: str) -> set[str]:
    """Metrics and labels that no worker exposes."""
    declared = {rule["record"]: labels_in(rule["expr"]) for rule in rules() if "record" in rule}
    for metric in METRICS:
        name = prometheus_name(metric)
        for exposed in (name + part for part in PARTS) if metric.kind == "histogram" else (name,):
            declared[exposed] = set(metric.labels)
    names = names_in(expression)
    labels = BY_PROMETHEUS.union(*(declared.get(name, set()) for name in names))
    return {name for name in names if name not in declared} | (labels_in(expression) - labels)
