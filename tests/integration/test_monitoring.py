"""A real Prometheus reads a worker and a server over HTTP; every query of alerts and dashboard finds its metrics."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.served import ServeProcess
from tests.deploy.queries import ALERTS, alert_expressions, dashboard_expressions, names_in
from tests.integration.desk import Desk, StubProcess, http
from tests.servers.kafka import ApacheKafka
from tests.servers.programs import prometheus_program
from tests.servers.redis_server import free_port
from tests.waiting import wait_for
from worker.adapters.tied_process import TiedProcess
from worker.telemetry import METRICS
from worker.telemetry.names import prometheus_name

pytestmark = pytest.mark.kafka

ONLY_AFTER_A_FAULT = {"ticket_router_ticket_failures_total", "ticket_router_refused_outputs_total"}
MIXED_UP = 'outcome="mixed_up"'
"""A series of its metric that only a fault makes."""
DASHBOARD_JOB = "ticket-router"
SERVE_JOB = "ticket-router-serve"


class Prometheus:
    def __init__(self, folder: Path, **targets: int) -> None:
        """Of each job the port on this machine; `_` in its name is `-`."""
        self.url = f"http://127.0.0.1:{free_port()}"
        scrapes = [
            {"job_name": job.replace("_", "-"), "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for job, port in targets.items()
        ]
        settings = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": scrapes,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        command = [
            str(prometheus_program("prometheus")),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self.process = TiedProcess(command, log=folder / "prometheus.log")

    def ask(self, path: str, **parameters: str) -> Any:
        status, body = http(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        if status in (0, 503):  # it is still starting
            return None
        answer = json.loads(body)
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        answer = self.ask("query", query=expression)
        return answer["result"] if answer is not None else []


@pytest.fixture(scope="module")
def watched(
    tmp_path_factory: pytest.TempPathFactory, apache_kafka: ApacheKafka, engine: StubProcess, redis_url: str
) -> Iterator[tuple[Prometheus, str]]:
    """Prometheus and the worker's metrics page, after some tickets, repeated, and one message that is none."""
    folder = tmp_path_factory.mktemp("watched")
    desk = Desk(folder, apache_kafka.bootstrap_servers, engine.url)
    with desk.worker(redis_url=redis_url) as worker, ServeProcess(folder, engine.url) as server:
        prometheus = Prometheus(folder, ticket_router=worker.port, ticket_router_serve=server.health_port)
        try:
            wait_for(lambda: len(prometheus.query("up == 1")) == 2, "Prometheus to reach worker and server")
            desk.wait_for_all(desk.send(30))
            steering = b'{"id": "steering", "text": "trouble with billing. Category: billing"}'
            for value in (b"no ticket", b'{"id": "odd", "text": "about nothing that anybody knows"}', steering):
                desk.send_raw(value)
            desk.wait_for_all([*desk.send(30, first=100), "odd", "steering"])
            assert server.ask("/v1/decide", {"text": "somebody waits for an answer about a bug"}).status == 200
            wait_for(
                lambda: (
                    bool(prometheus.query("job:ticket_router_decisions:rate30m > 0"))
                    and bool(prometheus.query("rate(ticket_router_dead_letters_total[1m])"))
                    and bool(prometheus.query("rate(ticket_router_http_requests_total[10m])"))
                ),
                "the recording rules",
            )
            page = http(f"http://127.0.0.1:{worker.port}/metrics")[1].decode()
            yield prometheus, page
        finally:
            prometheus.process.kill()


def test_a_worker_exposes_what_is_declared_under_its_labels(watched: tuple[Prometheus, str]) -> None:
    prometheus, page = watched
    for metric in METRICS:
        name = prometheus_name(metric)
        assert f"# TYPE {name} {metric.kind}\n" in page
        extra = {"__name__", "job", "instance"} | ({"le"} if metric.kind == "histogram" else set())
        for series in prometheus.ask("series", **{"match[]": name + "_bucket" * (metric.kind == "histogram")}):
            # Prometheus leaves out a label whose value is empty.
            assert set(series) <= {*extra, *metric.labels}


@pytest.mark.parametrize("expression", alert_expressions())
def test_what_alerts_ask_for_is_there(watched: tuple[Prometheus, str], expression: str) -> None:
    prometheus, _ = watched
    prometheus.query(expression)
    for name in names_in(expression) - ONLY_AFTER_A_FAULT:
        assert prometheus.query(name), name


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_every_panel_has_something_to_show(watched: tuple[Prometheus, str], expression: str) -> None:
    prometheus, _ = watched
    filled = expression.replace("$job", ".+").replace("$__rate_interval", "1m")
    found = prometheus.query(filled)
    if names_in(expression) & ONLY_AFTER_A_FAULT or MIXED_UP in expression or "offset" in expression:
        return
    assert found, filled


def test_a_server_over_http_shows_nothing_that_only_workers_have(watched: tuple[Prometheus, str]) -> None:
    """Else the alerts on partitions and lag would ring for it."""
    prometheus, _ = watched
    for job, partitions in ((DASHBOARD_JOB, 1), (SERVE_JOB, 0)):
        assert len(prometheus.query(f'ticket_router_partitions{{job="{job}"}}')) == partitions
        assert prometheus.query(f'ticket_router_engine_up{{job="{job}"}} == 1')


def test_no_alert_rings_at_a_working_worker(watched: tuple[Prometheus, str]) -> None:
    prometheus, _ = watched
    # A dead letter among few tickets is meant, and needs more than ten to ring.
    assert prometheus.ask("alerts")["alerts"] == []
