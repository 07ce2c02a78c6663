"""Real Kafka, real processes, exactly-once delivery: readers of committed records see every ticket once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import orjson
import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.contracts.stream_backends import QUIET
from tests.integration.desk import Desk, StubProcess, WorkerProcess, http
from tests.servers.kafka import ApacheKafka
from tests.waiting import wait_for
from worker.adapters.topic_log import Record

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(500)]


def test_killed_three_times_in_the_middle_of_2000_tickets_every_ticket_is_seen_once_and_in_order(desk: Desk) -> None:
    ids = desk.send(2000)
    settled = 0
    for _ in range(3):
        with desk.worker(max_in_flight=100) as worker:
            wait_for(lambda w=worker: w.status().get("settled", 0) >= 300, "progress")
            settled += worker.status().get("settled", 0)
            worker.kill()
    assert settled < 2000, "the kills came too late"
    with desk.worker(max_in_flight=100) as worker:
        found = desk.wait_for_all(ids)
        wait_for(lambda: worker.status()["lag"] == 0 and worker.status()["in_flight"] == 0, "the end")
    assert_once(desk, ids)
    assert all(len(topics) == 1 for topics in found.values())
    decisions = [orjson.loads(record.value or b"") for record in desk.records(desk.rules.decisions_topic)]
    assert len({decision["decision_id"] for decision in decisions}) == len(decisions) == 2000


def test_three_workers_of_which_one_is_killed_and_one_stopped_see_every_ticket_once(desk: Desk) -> None:
    ids = desk.send(900)
    workers = [WorkerProcess(desk, max_in_flight=30) for _ in range(3)]
    try:
        for worker in workers:
            worker.wait_ready()
        wait_for(lambda: sum(worker.status().get("settled", 0) for worker in workers) >= 200, "progress")
        workers[0].kill()
        ids += desk.send(900, first=900)
        wait_for(lambda: sum(worker.status().get("settled", 0) for worker in workers[1:]) >= 300, "progress")
        assert workers[1].terminate() == 0, workers[1].tail()
        desk.wait_for_all(ids)
    finally:
        for worker in workers:
            worker.kill()
    assert_once(desk, ids)
    assert "transactional producer" not in "".join(worker.tail() for worker in workers), "one fenced another"


def test_a_transaction_that_failed_is_made_again_without_asking_the_engine_again(
    desk: Desk, apache_kafka: ApacheKafka, engine: StubProcess
) -> None:
    with desk.worker(kafka_session_timeout_ms=45_000) as worker:
        desk.wait_for_all(desk.send(10))
        decided = metric(worker, "decisions")
        scored = engine.tell(latency_s=1.5)["counters"]["items"]  # the answers come while the broker is silent
        ids = desk.send(40, first=10)
        try:
            wait_for(lambda: worker.status()["in_flight"] == 40, "tickets in flight")
            apache_kafka.freeze()
            wait_for(lambda: metric(worker, "settle_failures") > 0, "a failed transaction")
        finally:
            apache_kafka.thaw()
            engine.tell(latency_s=0.01)
        desk.wait_for_all(ids)
        assert metric(worker, "decisions") - decided == 40, "a ticket was decided twice"
        assert engine.tell()["counters"]["items"] - scored < 60, "tickets were scored twice"  # probes are items too
    assert_once(desk, [f"t{number}" for number in range(50)])


def metric(worker: WorkerProcess, name: str) -> float:
    text = http(f"http://127.0.0.1:{worker.port}/metrics")[1].decode()
    pattern = rf"^ticket_router_{name}_total(?:{{.*}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


def assert_once(desk: Desk, ids: Sequence[str]) -> None:
    """Every id in one place, everything committed, and per key and topic in the order of the input."""
    ends = desk.records()
    assert sorted(ticket_id(record) for record in ends) == sorted(ids)
    sent = {ticket_id(record): record.offset for record in desk.records(desk.rules.input_topic)}
    lanes: dict[tuple[str, bytes | None], list[int]] = defaultdict(list)
    for record in ends:
        lanes[record.partition.topic, record.key].append(sent[ticket_id(record)])
    assert all(offsets == sorted(offsets) for offsets in lanes.values()), "out of order"
    assert uncommitted(desk) == 0


def ticket_id(record: Record) -> str:
    return str(orjson.loads(record.value or b"")["id"])


def uncommitted(desk: Desk) -> int:
    consumer = Consumer(
        {"bootstrap.servers": desk.bootstrap_servers, "group.id": f"ticket-router.{desk.rules.id}"}, logger=QUIET
    )
    try:
        topic = desk.rules.input_topic
        numbers = consumer.list_topics(topic, timeout=20).topics[topic].partitions
        found = consumer.committed([TopicPartition(topic, number) for number in numbers], timeout=30)
        ends = [consumer.get_watermark_offsets(at, timeout=20)[1] for at in found]
        return sum(end - max(0, at.offset) for at, end in zip(found, ends, strict=True))
    finally:
        consumer.close()
