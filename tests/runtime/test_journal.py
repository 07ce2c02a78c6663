"""Journal: what alerts need is there from the first wait on, and stays within closed lists of labels."""

from __future__ import annotations

import math

import pytest
import structlog
from structlog.testing import capture_logs

from tests.core.sets import artefact, certificate, rule_set
from worker.core.policy import Calibration, NoCalibration, reason
from worker.ports import Delivery, Gap, Output, Partition, RefusedOutput
from worker.runtime.journal import REFUSALS_EVERY_S, Journal
from worker.telemetry import (
    CALIBRATION_IN_FORCE,
    CERTIFIED,
    ENGINE_ENDPOINT_UP,
    ENGINE_UP,
    EXPIRED,
    INFO,
    LOG_STEPPED_BACK,
    PARTITIONS,
    REFUSED_OUTPUTS,
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


def test_a_worker_that_waits_says_whose_it_is_and_afterwards_only_what_it_runs(
    metrics: Metrics, journal: Journal
) -> None:
    journal.belongs_to(RULES)
    assert values(metrics, INFO) == {f"{RULES.id}/1/": 1}
    assert values(metrics, CALIBRATION_IN_FORCE) == {}, "by which alerts tell it from one that has started"
    made = artefact(RULES, certificate("billing"))
    journal.runs(RULES, Calibration(made))
    assert values(metrics, INFO) == {f"{RULES.id}/1/{made.digest}": 1}


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


def test_a_topic_that_refuses_everything_is_a_line_now_and_then_that_says_how_many_and_every_one_is_counted(
    metrics: Metrics,
) -> None:
    at = 0.0
    journal = Journal(metrics, log_ticket_text=False, clock=lambda: at)

    def refuse(offset: int, topic: str = "desk.login", code: str = "too_large") -> None:
        delivery = Delivery(Partition("tickets", 0), offset, 1, None, b"{}", (), -1)
        journal.refused(RefusedOutput(delivery, Output(topic, None, b"{}"), code, "no"))

    with capture_logs() as lines:
        journal._log = structlog.get_logger()
        for offset in range(1_000):
            refuse(offset)
            journal.watched((), ())
        refuse(1_000, "desk.bug")
        refuse(1_001, code="forbidden")
        at += REFUSALS_EVERY_S
        journal.watched((), ())
        refuse(1_002)
        at += REFUSALS_EVERY_S - 1.0
        journal.watched((), ())
        journal.ends()
        journal.stopped(1_003)
    told = [(line["offset"], line["code"], line["count"]) for line in lines if line["event"] == "output.refused"]
    assert told == [
        (0, "too_large", 1),
        (1_000, "too_large", 1),
        (1_001, "forbidden", 1),
        (999, "too_large", 999),
        (1_002, "too_large", 1),
    ]
    assert values(metrics, REFUSED_OUTPUTS) == {"too_large": 1_002, "forbidden": 1}


def test_after_a_while_without_refusals_the_next_is_told_at_once(metrics: Metrics) -> None:
    at = 0.0
    journal = Journal(metrics, log_ticket_text=False, clock=lambda: at)
    delivery = Delivery(Partition("tickets", 0), 7, 1, None, b"{}", (), -1)
    with capture_logs() as lines:
        journal._log = structlog.get_logger()
        for _ in range(3):
            journal.refused(RefusedOutput(delivery, Output("desk.login", None, b"{}"), "too_large", "no"))
            at += REFUSALS_EVERY_S
            journal.watched((), ())
    assert [line["count"] for line in lines] == [1, 1, 1]
