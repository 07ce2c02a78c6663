"""Real Kafka, real processes: what the README promises of each failure."""

from __future__ import annotations

import signal
import time

import pytest
import redis
from confluent_kafka.admin import AdminClient

from tests.integration.desk import Desk, StubProcess, WorkerProcess, http
from tests.servers.kafka import ApacheKafka
from tests.servers.redis_server import free_port, redis_server
from tests.waiting import wait_for
from worker.adapters.kafka_client import KafkaConfig
from worker.adapters.kafka_topics import describe_topics
from worker.core.envelope import DEAD_LETTER_REASON

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]


def test_killed_in_the_middle_of_2000_tickets_every_id_is_in_an_output_topic(desk: Desk) -> None:
    ids = desk.send(2000)
    for kill_at in (200, 900):
        with desk.worker(max_in_flight=100) as worker:
            wait_for(lambda at=kill_at, w=worker: w.status().get("settled", 0) >= at, "progress")
            worker.kill()
    with desk.worker(max_in_flight=100):
        found = desk.wait_for_all(ids)
    copies = sum(len(topics) for topics in found.values()) - len(ids)
    assert copies <= 2 * 100, "more duplicates than there were tickets in flight"
    right = {"billing": "t0", "login": "t1", "bug": "t2"}
    assert all(set(found[i]) == {f"{desk.rules.id}.{label}"} for label, i in right.items())


def test_sigterm_under_load_exits_0_without_loss_or_duplicate(desk: Desk) -> None:
    ids = desk.send(600)
    with desk.worker(max_in_flight=50) as worker:
        wait_for(lambda: worker.status()["settled"] >= 100, "progress")
        assert worker.terminate() == 0, worker.tail()
    with desk.worker():
        found = desk.wait_for_all(ids)
    assert all(len(topics) == 1 for topics in found.values())


def test_sigterm_while_the_engine_hangs_ends_within_the_grace_and_commits_nothing_open(
    desk: Desk, engine: StubProcess
) -> None:
    with desk.worker(drain_s=1, engine_timeout_s=60) as worker:
        engine.tell(fault="hang")
        ids = desk.send(20)
        wait_for(lambda: worker.status()["in_flight"] == 20, "tickets in flight")
        started = time.monotonic()
        assert worker.terminate() == 0, worker.tail()
        assert time.monotonic() - started < 1 + 40  # the drain, then leaving the group on a loaded machine
        assert not desk.found()
    engine.tell(fault="none")
    with desk.worker():
        desk.wait_for_all(ids)


def test_a_second_signal_ends_it_at_once(desk: Desk, engine: StubProcess) -> None:
    with desk.worker(drain_s=60, engine_timeout_s=60) as worker:
        engine.tell(fault="hang")
        ids = desk.send(5)
        wait_for(lambda: worker.status()["in_flight"] == 5, "tickets in flight")
        worker.process.send_signal(signal.SIGTERM)
        wait_for(lambda: worker.status().get("draining", False), "the drain")
        assert worker.terminate(40) == 130
        assert b'"worker.abandoned"' in worker.log.read_bytes().splitlines()[-1]
    engine.tell(fault="none")
    with desk.worker():
        desk.wait_for_all(ids)


def test_an_engine_that_is_killed_and_comes_back_costs_nothing_but_time(desk: Desk, engine: StubProcess) -> None:
    ids = desk.send(100)
    with desk.worker() as worker:
        desk.wait_for_all(ids)
        engine.kill()
        ids += desk.send(200, first=100)
        wait_for(lambda: not worker.ready(), "readiness to go")
        assert b"engine is down" in http(f"http://127.0.0.1:{worker.port}/readyz")[1]
        assert http(f"http://127.0.0.1:{worker.port}/livez")[0] == 200
        engine.start()
        found = desk.wait_for_all(ids)
        wait_for(worker.ready, "readiness to come back")
    assert not any(desk.rules.human_topic in topics for topics in found.values()), "somebody was escalated"


def test_a_worker_starts_before_its_engine_and_waits_for_it(desk: Desk, engine: StubProcess) -> None:
    engine.kill()
    ids = desk.send(10)
    worker = WorkerProcess(desk)
    try:
        wait_for(lambda: b"engine-1" in http(f"http://127.0.0.1:{worker.port}/readyz")[1], "the reason")
        assert worker.process.poll() is None
        engine.start()
        desk.wait_for_all(ids)
    finally:
        worker.kill()


def test_without_redis_with_garbage_in_it_and_with_it_the_routes_are_the_same(desk: Desk) -> None:
    port = free_port()
    with desk.worker(redis_url=f"redis://127.0.0.1:{port}/0", cache_memory_bytes=0) as worker:
        first = desk.wait_for_all(desk.send(60))
        with redis_server(port=port) as url:
            desk.wait_for_all(desk.send(60, first=60))
            client = redis.Redis.from_url(url)
            wait_for(lambda: client.dbsize() >= 30, "scores in Redis")
            for key in client.scan_iter():
                client.set(key, b"\x00garbage" * 40)
            before = worker.status()["settled"]
            desk.send(60, first=60)  # the same texts: every look-up finds garbage
            wait_for(lambda: worker.status()["settled"] >= before + 60, "the repeats")
            wait_for(lambda: _metric(worker, 'outcome="rejected"') >= 30, "refused values")
        last = desk.wait_for_all(desk.send(60, first=120))
    assert all(len(set(topics)) == 1 for found in (first, last) for topics in found.values())
    assert not any(desk.rules.human_topic in topics for topics in last.values())


def test_a_broker_that_restarts_is_waited_for(desk: Desk, apache_kafka: ApacheKafka) -> None:
    ids = desk.send(300)
    # At least once: killed between a commit and its markers, the only broker of a cluster forgets the markers when it
    # starts (Kafka 4.3.1), and what lies behind such a transaction can never be read.
    with desk.worker(max_in_flight=50, delivery="at_least_once") as worker:
        wait_for(lambda: worker.status()["settled"] >= 50, "progress")
        apache_kafka.kill()
        wait_for(lambda: not worker.ready(), "readiness to go", 90)
        apache_kafka.start()
        found = desk.wait_for_all(ids, 150)
        wait_for(worker.ready, "readiness to come back", 90)
    assert all(len(set(topics)) == 1 for topics in found.values())


def test_bytes_that_are_no_ticket_are_dead_lettered_and_the_next_ticket_flows(desk: Desk) -> None:
    with desk.worker():
        for value in (None, b"", b"\xff\xfe", b"[]", b'{"text": "' + b"x" * 600_000 + b'"}'):
            desk.send_raw(value)
        desk.wait_for_all(desk.send(3))
        wait_for(lambda: len(desk.records(desk.rules.dead_letter_topic)) == 5, "dead letters")
    reasons = {dict(r.headers)[DEAD_LETTER_REASON] for r in desk.records(desk.rules.dead_letter_topic)}
    assert reasons == {b"null_value", b"invalid_json", b"invalid_utf8", b"not_an_object", b"too_large"}


def test_a_missing_topic_and_a_closed_port_are_one_clear_line_and_an_exit_code(desk: Desk) -> None:
    gone = [f"{desk.rules.id}.billing", desk.rules.dead_letter_topic]
    admin = AdminClient({"bootstrap.servers": desk.bootstrap_servers})
    for future in admin.delete_topics(gone).values():
        future.result(30)
    config = KafkaConfig(desk.bootstrap_servers, desk.rules.input_topic, "tests")
    wait_for(lambda: not describe_topics(config, gone), "the topics to be gone")
    for settings, said in (
        ({}, ", ".join(map(repr, gone)) + ". Create them: `ticket-router topics --create"),
        ({"kafka_input_topic": "tickets.misspelt"}, "tickets.misspelt"),
        ({"kafka_bootstrap_servers": f"127.0.0.1:{free_port()}"}, "bootstrap servers"),
        ({"kafka_input_topic": desk.rules.human_topic}, "round for ever"),
    ):
        worker = WorkerProcess(desk, **settings)
        assert worker.process.wait(60) == 2, worker.tail()
        last = worker.tail().strip().splitlines()[-1]
        assert said in last
        assert last.startswith("ticket-router: ")


def _metric(worker: WorkerProcess, label: str) -> float:
    lines = http(f"http://127.0.0.1:{worker.port}/metrics")[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line and "lookups" in line)
