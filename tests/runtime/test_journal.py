"""Journal: what alerts need is there from the first wait on, and stays within closed lists of labels."""

from __future__ import annotations

import math

import pytest

from tests.core.sets import artefact, certificate, rule_set
from worker.core.policy import Calibration, NoCalibration, reason
from worker.ports import Gap, Partition
from worker.runtime.journal import Journal
from worker.telemetry import (
    CALIBRATION_IN_FORCE,
    CERTIFIED,
    ENGINE_ENDPOINT_UP,
    ENGINE_UP,
    EXPIRED,
    INFO,
    LOG_STEPPED_BACK,
    PARTITIONS,
    Metrics,
)

RULES = rule_set("billing", "login", "bug", none=True, categories={"login": {"alpha": 0.05}})


def values(metrics: Metrics, metric: object) -> dict[str, float]:
    return {"/".join(v for _, v in s.labels): s.value for s in metrics.samples(metric)}  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def journal(metrics: Metrics) -> Journal:
    return Journal(metrics, log_ticket_text=False)


def test_a_worker_that_waits_for_its_engine_shows_it_down_and_not_nothing(metrics: Metrics, journal: Journal) -> None:
    assert values(metrics, ENGINE_UP) == {}
    journal.waiting("engine-1: it does not answer")
    assert values(metrics, ENGINE_UP) == {"": 0}
    assert values(metrics, PARTITIONS) == {"": 0}


def test_a_server_over_http_that_waits_shows_no_partitions_which_it_will_never_have(
    metrics: Metrics, journal: Journal
) -> None:
    journal.waiting("engine-1: it does not answer", for_partitions=False)
    assert values(metrics, ENGINE_UP) == {"": 0}
    assert values(metrics, PARTITIONS) == {}


def test_a_category_is_certified_where_any_score_would_route_to_it(metrics: Metrics, journal: Journal) -> None:
    refused = certificate("bug", threshold=math.inf, m=0, k=0)
    made = artefact(RULES, certificate("billing"), certificate("login"), refused)
    journal.runs(RULES, Calibration(made))
    none = RULES.categories.ids[-1]
    # login has a certificate, and the rules demand a better one.
    assert values(metrics, CERTIFIED) == {"billing": 1, "login": 0, "bug": 0, none: 0}
    assert values(metrics, CALIBRATION_IN_FORCE) == {"": 1}
    assert values(metrics, INFO) == {f"{RULES.id}/1/{made.digest}": 1}


def test_without_a_calibration_nothing_is_certified_and_the_reason_is_told(metrics: Metrics, journal: Journal) -> None:
    journal.runs(RULES, NoCalibration(reason("fingerprint_changed", detail="model")))
    assert set(values(metrics, CERTIFIED).values()) == {0}
    assert values(metrics, CALIBRATION_IN_FORCE) == {"fingerprint_changed": 0}
    assert values(metrics, INFO) == {f"{RULES.id}/1/": 1}


def test_every_endpoint_has_its_own_breaker(metrics: Metrics, journal: Journal) -> None:
    up = {"engine-1": True, "engine-2": False}
    journal.watch_endpoints(tuple(up), up.__getitem__)
    assert values(metrics, ENGINE_ENDPOINT_UP) == {"engine-1": 1, "engine-2": 0}
    up["engine-2"] = True
    assert values(metrics, ENGINE_ENDPOINT_UP) == {"engine-1": 1, "engine-2": 1}


def test_messages_that_were_deleted_unread_and_logs_that_step_back_are_counted(
    metrics: Metrics, journal: Journal
) -> None:
    journal.gap(Gap(Partition("tickets", 0), 10, 50))
    journal.gap(Gap(Partition("tickets", 1), 10, 13))
    assert values(metrics, EXPIRED) == {"": 43}
    assert values(metrics, LOG_STEPPED_BACK) == {"": 0}
    journal.gap(Gap(Partition("tickets", 0), 60, 0))
    assert values(metrics, EXPIRED) == {"": 43}
    assert values(metrics, LOG_STEPPED_BACK) == {"": 1}
