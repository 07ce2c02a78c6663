"""Real Kafka, real processes: how long tickets wait for an engine that is slow or down, and where they go then."""

from __future__ import annotations

import time

import orjson
import pytest

from tests.integration.desk import Desk, StubProcess, http
from tests.waiting import wait_for
from worker.adapters.topic_log import Record
from worker.core.envelope import DECISION_HEADER
from worker.ports import Output

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


def test_one_ticket_that_the_engine_never_answers_goes_to_people_at_its_deadline_and_stalls_nobody(
    desk: Desk, engine: StubProcess
) -> None:
    engine.tell(slow="never answered")
    try:
        # A request that holds the slow ticket keeps its companions for the engine's timeout; they are asked again.
        with desk.worker(ticket_deadline_s=8, engine_timeout_s=2, engine_attempts=10) as worker:
            body = orjson.dumps({"id": "slow", "text": "never answered"})
            desk._writer.write(Output(desk.rules.input_topic, None, body), 0)
            desk._writer.flush(60)
            sent = time.monotonic()
            wait_for(lambda: worker.status()["in_flight"] == 1, "the slow ticket")
            desk.send(60)
            lanes = [record.partition.number for record in desk.records(desk.rules.input_topic)]
            wait_for(lambda: worker.status()["settled"] == 61 - lanes.count(0), "the other partitions", 20)
            assert worker.status()["in_flight"] == lanes.count(0)
            assert "slow" not in desk.found(), "this machine is too slow for this test"
            assert worker.ready()
            wait_for(lambda: "slow" in desk.found(), "the slow ticket's end")
            assert time.monotonic() - sent < 8 + 20  # a probe of the engine, settling, and a loaded machine
            wait_for(lambda: worker.status()["in_flight"] == 0, "the rest of its partition")
    finally:
        engine.tell(slow=None)
    (slow,) = desk.records(desk.rules.human_topic)  # nobody else went to people
    assert reason_of(slow) == "engine_timeout"


def test_under_escalate_tickets_go_to_people_when_they_have_waited_long_enough_and_are_routed_when_it_is_back(
    desk: Desk, engine: StubProcess
) -> None:
    with desk.worker(on_engine_down="escalate", max_wait_s=3) as worker:
        desk.wait_for_all(desk.send(5))
        engine.kill()
        sent = time.monotonic()
        ids = desk.send(20, first=5)
        found = desk.wait_for_all(ids)
        assert time.monotonic() - sent > 3
        assert {topic for i in ids for topic in found[i]} == {desk.rules.human_topic}
        assert {reason_of(record) for record in desk.records(desk.rules.human_topic)} == {"engine_unavailable"}
        assert b"engine is down" in http(f"http://127.0.0.1:{worker.port}/readyz")[1]
        engine.start()
        wait_for(worker.ready, "the engine")
        later = desk.wait_for_all(desk.send(20, first=25))
        assert not any(desk.rules.human_topic in later[f"t{n}"] for n in range(25, 45))


def test_an_engine_that_hangs_costs_a_lone_ticket_time_but_not_its_route(desk: Desk, engine: StubProcess) -> None:
    """The ticket's deadline passes before five calls have failed: a probe finds out that it is the engine."""
    with desk.worker(ticket_deadline_s=3, engine_timeout_s=2) as worker:
        desk.wait_for_all(desk.send(1))
        engine.tell(fault="hang")
        try:
            ids = desk.send(1, first=1)
            wait_for(lambda: not worker.ready(), "the engine to count as down")
            assert worker.status()["in_flight"] == 1
        finally:
            engine.tell(fault="none")
        found = desk.wait_for_all(ids)
    assert desk.rules.human_topic not in found["t1"]


def reason_of(record: Record) -> str:
    body = dict(record.headers)[DECISION_HEADER] or b""
    return str(orjson.loads(body)["reasons"][0]["code"])
