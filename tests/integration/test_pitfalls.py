"""Real Kafka, real processes: what goes wrong with other Kafka consumers, tried on the worker (docs/pitfalls.md)."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import orjson
import pytest

from tests.contracts.stream_backends import ApacheBackend
from tests.integration.desk import Desk, StubProcess, WorkerProcess, http
from tests.integration.test_exactly_once import assert_once, uncommitted
from tests.servers.kafka import ApacheKafka
from tests.waiting import wait_for
from worker.core.envelope import DEAD_LETTER_REASON, ORIGIN_OFFSET, POINTER
from worker.ports import Output

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_sigterm_under_load_while_the_broker_is_silent_ends_within_the_grace_period(
    desk: Desk, apache_kafka: ApacheKafka, engine: StubProcess, delivery: str
) -> None:
    ids = desk.send(10)
    with desk.worker(delivery=delivery, drain_s=2, kafka_session_timeout_ms=12_000) as worker:
        desk.wait_for_all(ids)
        engine.tell(latency_s=1.0)
        ids += desk.send(100, first=10)
        wait_for(lambda: worker.status()["in_flight"] > 20, "tickets in flight")
        apache_kafka.freeze()
        try:
            before = time.monotonic()
            assert worker.terminate(60) == 0, worker.tail()
            took = time.monotonic() - before
        finally:
            apache_kafka.thaw()
            engine.tell(latency_s=0.01)
        assert took < 2 + 20, "stop_grace_period is the drain and 20 s"
    with desk.worker(delivery=delivery):
        found = desk.wait_for_all(ids)
    if delivery == "exactly_once":
        assert all(len(topics) == 1 for topics in found.values())


def test_a_transaction_that_hangs_in_the_input_is_named_until_it_ends(desk: Desk, apache_kafka: ApacheKafka) -> None:
    with desk.worker(stalled_s=5, kafka_session_timeout_ms=45_000) as worker:
        desk.wait_for_all(desk.send(10))
        with ApacheBackend(apache_kafka, "apache").open_transaction(desk.rules.input_topic, [b"1", b"2"]):
            wait_for(lambda: not worker.ready(), "the watchdog")
            code, text = http(f"http://127.0.0.1:{worker.port}/readyz")
            assert code == 503
            assert f"partition {desk.rules.input_topic}/0".encode() in text
            assert b"transaction" in text
            assert len(worker.status()["standstills"]) == 1
            assert worker.status()["lags"][f"{desk.rules.input_topic}/0"] >= 2
            metrics = http(f"http://127.0.0.1:{worker.port}/metrics")[1].decode()
            assert 'ticket_router_standstills{what="intake"} 1' in metrics
        wait_for(worker.ready, "the end of the transaction")
        desk.wait_for_all(desk.send(10, first=10))
    told = [line["event"] for line in log_of(worker) if line["event"].startswith(("worker.stand", "worker.moving"))]
    assert told == ["worker.standstill", "worker.moving_again"]


def test_what_was_paused_before_two_rebalances_flows_afterwards_and_commits_to_the_end(
    desk: Desk, engine: StubProcess
) -> None:
    ids = desk.send(150)
    waiting = {"max_in_flight": 20, "ticket_deadline_s": 120, "engine_timeout_s": 8, "engine_attempts": 10}
    with desk.worker(**waiting) as worker:
        engine.tell(slow=" trouble with ")  # tickets wait, probes are answered
        try:
            ids += desk.send(150, first=150)
            wait_for(lambda: worker.status()["in_flight"] == 20, "a worker that is full")
            for _ in range(2):
                with desk.worker(**waiting, drain_s=1) as visitor:
                    wait_for(lambda: worker.status()["assigned"] < 3, "a partition to leave")
                    assert visitor.terminate() == 0
                wait_for(lambda: worker.status()["assigned"] == 3, "the partitions to come back", 90)
                wait_for(lambda: worker.status()["in_flight"] == 20, "a worker that is full again")
        finally:
            engine.tell(slow=None)
        desk.wait_for_all(ids)
        wait_for(lambda: worker.status()["lag"] == 0 and worker.status()["in_flight"] == 0, "the end")
        assert worker.ready()
    assert_once(desk, ids)


def test_a_worker_that_was_stopped_for_longer_than_its_session_goes_on_and_nothing_is_seen_twice(desk: Desk) -> None:
    ids = desk.send(300)
    with desk.worker(max_in_flight=50) as sleeper:
        wait_for(lambda: sleeper.status()["settled"] > 0, "progress")
        sleeper.process.send_signal(signal.SIGSTOP)
        try:
            ids += desk.send(300, first=300)
            with desk.worker(max_in_flight=50) as worker:
                wait_for(lambda: worker.status()["assigned"] == 3, "all partitions", 90)
                wait_for(lambda: worker.status()["settled"] > 100, "progress")
                sleeper.process.send_signal(signal.SIGCONT)
                desk.wait_for_all(ids)
                wait_for(lambda: sleeper.ready() and worker.ready(), "both to share the partitions", 90)
                later = desk.send(50, first=600)
                desk.wait_for_all([*ids, *later])
        finally:
            sleeper.process.send_signal(signal.SIGCONT)
        wait_for(lambda: sleeper.status()["in_flight"] == 0 and uncommitted(desk) == 0, "the end")
    assert_once(desk, [*ids, *later])


@pytest.mark.parametrize(
    ("protocol", "delivery", "copies"), [("classic", "exactly_once", 0), ("consumer", "at_least_once", 100)]
)
def test_workers_that_come_and_go_under_load_lose_nothing(
    desk: Desk, protocol: str, delivery: str, copies: int
) -> None:
    """One worker to three and back, twice, each ended by SIGTERM, some of them in the middle of a rebalance."""
    settings = {"kafka_group_protocol": protocol, "delivery": delivery, "max_in_flight": 50, "batch_wait_ms": 500}
    ids: list[str] = []
    workers = [WorkerProcess(desk, **settings).wait_ready()]
    try:
        for _ in range(2):
            ids += desk.send(200, first=len(ids))
            workers += [WorkerProcess(desk, **settings) for _ in range(2)]
            workers[-2].wait_ready()
            ids += desk.send(200, first=len(ids))
            for leaving in workers[:-1]:
                assert leaving.terminate() == 0, leaving.tail()
            workers = workers[-1:]
        found = desk.wait_for_all(ids)
        wait_for(lambda: uncommitted(desk) == 0, "the last commit")
    finally:
        for worker in workers:
            worker.kill()
    counted = Counter({ticket: len(topics) for ticket, topics in found.items()})
    assert counted.total() - len(ids) <= copies


def test_a_dead_letter_that_does_not_fit_with_its_headers_becomes_a_pointer(desk: Desk) -> None:
    with desk.worker() as worker:
        desk.send_raw(b"{" + b"x" * 999_800)  # Kafka takes a million bytes
        wait_for(lambda: bool(desk.records(desk.rules.dead_letter_topic)), f"the dead letter; {worker.tail()}")
        desk.wait_for_all(desk.send(3))
    (dead,) = desk.records(desk.rules.dead_letter_topic)
    headers = dict(dead.headers)
    assert dead.value is None
    assert headers[POINTER] == b"value"
    assert headers[ORIGIN_OFFSET] == b"0"
    assert DEAD_LETTER_REASON in headers


def test_a_worker_that_would_make_dead_letters_of_a_whole_topic_ends_before_it_does(desk: Desk) -> None:
    for n in range(300):
        desk._writer.write(Output(desk.rules.input_topic, b"k%d" % (n % 50), b'{"elsewhere": "the text"}'))
    desk._writer.flush(60)
    for _ in range(2):  # as a supervisor would
        worker = WorkerProcess(desk)
        try:
            assert worker.process.wait(90) == 3, worker.tail()
        finally:
            worker.kill()
        last = worker.tail().strip().splitlines()[-1]
        assert last.startswith("ticket-router: ")
        assert "ROUTER_DEAD_LETTER_LIMIT" in last
        assert "no_text" in last
    assert desk.records(desk.rules.dead_letter_topic) == []
    with desk.worker(dead_letter_limit=0):
        wait_for(lambda: len(desk.records(desk.rules.dead_letter_topic)) == 300, "the dead letters")


def test_idle_connections_that_the_broker_closes_make_no_noise(tmp_path: Path, engine: StubProcess) -> None:
    (tmp_path / "kafka").mkdir()
    (tmp_path / "desk").mkdir()
    with ApacheKafka(tmp_path / "kafka", {"connections.max.idle.ms": "2000"}) as server:
        desk = Desk(tmp_path / "desk", server.bootstrap_servers, engine.url)
        with desk.worker() as worker:
            desk.wait_for_all(desk.send(3))
            time.sleep(8)  # four times as long as a connection may be idle
            assert worker.ready()
            lines = log_of(worker)  # raises where a line is no JSON
            desk.wait_for_all(desk.send(3, first=3))
    noise = [line for line in lines if line["event"] == "library.message"]
    assert len(noise) <= 3, noise
    assert not [line for line in lines if line["event"].startswith("broker.")]


def log_of(worker: WorkerProcess) -> list[dict[str, str]]:
    return [orjson.loads(line) for line in worker.log.read_bytes().splitlines()]
