"""The dashboard can be loaded as it is, and shows only what the worker exposes."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.deploy.queries import DASHBOARD, DEPLOY, dashboard_expressions, panels, undeclared


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_panels_name_only_metrics_and_labels_that_are_declared(expression: str) -> None:
    assert not undeclared(expression)


def test_panels_have_their_own_place_and_number() -> None:
    numbers = [panel["id"] for panel in panels()]
    assert len(set(numbers)) == len(numbers)
    taken: dict[tuple[int, int], int] = {}
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"], panel["title"]


def test_every_panel_asks_the_chosen_source_for_the_chosen_jobs() -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}", panel["title"]
            assert target["expr"].count('job=~"$job"') >= 1, panel["title"]


def test_provisioning_finds_source_and_dashboard_where_compose_puts_them() -> None:
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert [(source["type"], source["url"]) for source in sources] == [("prometheus", "http://prometheus:9090")]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/ticket-router.yml").read_text())[
        "providers"
    ]
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text(encoding="utf-8"))
    grafana = compose["services"]["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert mounted["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
    assert json.loads(DASHBOARD.read_text(encoding="utf-8"))["uid"] == "ticket-router"
