"""Three Kafka nodes and real worker processes: nodes and workers go and come while tickets flow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from tests.chaos.deployment import topics_of
from tests.chaos.ledger import Verdict, judge, read
from tests.chaos.offsets import CommittedOffsets
from tests.chaos.workload import POISON, REFUSED, Sent, tickets
from tests.integration.desk import Desk, StubProcess, WorkerProcess
from tests.servers.kafka import KafkaCluster
from tests.waiting import wait_for
from worker.adapters.topic_log import TopicWriter
from worker.ports import Output

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]

PARTITIONS = 6
PATIENCE_S = 120.0
RESUMED_S = 30.0
"""So soon after the brokers are back tickets are settled again."""

SETTINGS = {
    "max_in_flight": 200,
    "batch_items": 8,
    "batch_concurrency": 4,
    "settle_interval_ms": 20,  # so that something is being settled most of the time
    "kafka_properties": '{"heartbeat.interval.ms": 500}',  # by which members learn of a rebalance
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    cleanup = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"}
    with KafkaCluster(tmp_path_factory.mktemp("kafka"), cleanup) as nodes:
        yield nodes


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


class Stream:
    """Tickets on a desk of their own, the workers that take them, and how far they are."""

    def __init__(self, desk: Desk, stack: ExitStack, workers: int, **settings: object) -> None:
        self.desk = desk
        self._settings = {**SETTINGS, **settings}
        self.topics = topics_of(desk.rules)
        self._stack = stack
        group = f"ticket-router.{desk.rules.id}"
        self._writer = TopicWriter(desk.bootstrap_servers)
        self._offsets = stack.enter_context(
            CommittedOffsets(desk.bootstrap_servers, group, self.topics.input, PARTITIONS)
        )
        self.workers = [self.worker() for _ in range(workers)]
        for worker in self.workers:
            worker.wait_ready()
        self._tickets = tickets(7, 10_000)
        self._sent: list[Sent] = []

    def worker(self) -> WorkerProcess:
        process = WorkerProcess(self.desk, **self._settings)
        self._stack.callback(process.kill)
        return process

    def send(self, count: int) -> None:
        """So many more; returns when the workers are at them, and most are still to be done."""
        settled = self.settled
        more = list(islice(self._tickets, count))
        for each in more:
            self._writer.write(Output(self.topics.input, each.key, each.value))
        self._writer.flush(60)
        self._sent += more
        self.wait_settled(settled + 50)
        assert self.settled < len(self._sent) - 100, "the workers were too fast"

    @property
    def settled(self) -> int:
        return self._offsets.settled

    def wait_settled(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        wait_for(lambda: self.settled >= count, f"{count} settled tickets; {self.settled} are", timeout_s)

    def verdict(self) -> Verdict:
        """When everything is settled. Missing, duplicates, order, and offsets committed before their output."""
        self.wait_settled(len(self._sent))
        until = time.monotonic() + PATIENCE_S
        came_in = read(self.desk.bootstrap_servers, (self.topics.input,), until)
        came_out = read(self.desk.bootstrap_servers, self.topics.outputs, until)
        return judge(self.topics, self._sent, came_in, came_out, self._offsets.samples)

    def assert_once_and_in_order(self) -> None:
        verdict = self.verdict()
        assert not verdict.problems
        assert verdict.ends.total() == len(self._sent)


@pytest.fixture
def desk(tmp_path: Path, cluster: KafkaCluster, engine: StubProcess) -> Desk:
    cluster.wait_in_sync()
    engine.tell(poison=POISON, refused=REFUSED, latency_s=0.1)
    return Desk(tmp_path, cluster.bootstrap_servers, engine.url, PARTITIONS)


def test_a_worker_and_the_coordinator_which_leads_input_partitions_are_killed_together(
    desk: Desk, cluster: KafkaCluster, stack: ExitStack
) -> None:
    stream = Stream(desk, stack, workers=2)
    stream.send(600)
    victim = cluster.coordinator(f"ticket-router.{desk.rules.id}")
    assert victim in {cluster.leader(stream.topics.input, number) for number in range(PARTITIONS)}
    stream.workers[0].kill()
    cluster.nodes[victim].kill()
    stream.wait_settled(500)  # without both
    cluster.nodes[victim].start()
    stream.assert_once_and_in_order()


def test_all_brokers_are_killed_and_the_stream_goes_on_where_it_was(
    desk: Desk, cluster: KafkaCluster, stack: ExitStack
) -> None:
    """At least once: when all start together, Kafka 4.3.1 may skip the markers of a transaction that had just ended."""
    stream = Stream(desk, stack, workers=2, delivery="at_least_once", kafka_session_timeout_ms=45_000)
    stream.send(600)
    cluster.kill()
    cluster.start()  # takes some seconds
    stream.wait_settled(stream.settled + 100, RESUMED_S)
    verdict = stream.verdict()
    assert not verdict.missing
    assert not verdict.early
    assert not verdict.out_of_order
    assert not verdict.misplaced


def test_three_workers_are_restarted_one_by_one_under_load(desk: Desk, stack: ExitStack) -> None:
    stream = Stream(desk, stack, workers=3)
    for worker in stream.workers:
        stream.send(600)
        assert worker.terminate() == 0, worker.tail()
        stream.worker().wait_ready()
    stream.assert_once_and_in_order()
