"""What a chaos run is played on: brokers, cache, engine and worker processes, each of which can be struck.

All are children that end with this process, however it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tests.chaos.ledger import Topics
from tests.chaos.schedule import WORKERS
from tests.chaos.workload import POISON, REFUSED
from tests.integration.desk import COMMAND, LABELS, Desk, http
from tests.servers.kafka import ApacheKafka, KafkaCluster
from tests.servers.redis_server import RedisServer, free_port
from worker.adapters.tied_process import TiedProcess
from worker.core.rules import RuleSet

PARTITIONS = 6
SESSION_MS = 6_000
IN_FLIGHT = 200

BROKER_PROPERTIES = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"}
"""A dead worker's transaction holds up its partitions until the coordinator looks for such: every 10 s by default."""

ONE_NODE_PROPERTIES = {**BROKER_PROPERTIES, "broker.session.timeout.ms": "60000"}
"""A single node that stands still for longer than its session (9 s by default, its heartbeats included) is fenced when
it wakes up, leads nothing for a moment, and skips the markers of transactions that end then (Kafka 4.3.1): what was
aborted becomes visible with the producer's next commit, what was committed never does."""

WORKER_SETTINGS = {
    "ROUTER_DELIVERY": "exactly_once",
    "ROUTER_KAFKA_SESSION_TIMEOUT_MS": str(SESSION_MS),
    "ROUTER_MAX_IN_FLIGHT": str(IN_FLIGHT),
    # Small enough that scoring takes a while, and a fault meets work in flight.
    "ROUTER_BATCH_ITEMS": "8",
    "ROUTER_BATCH_CONCURRENCY": "4",
    "ROUTER_ENGINE_TIMEOUT_S": "5",
    # So that a worker is in a transaction most of the time, and is struck in the middle of one.
    "ROUTER_SETTLE_INTERVAL_MS": "20",
    "ROUTER_LOG_FORMAT": "json",
}
GROUP_SETTINGS: Mapping[str, Mapping[str, str]] = {
    # Members learn of a rebalance by their heartbeats, every 3 s by default.
    "classic": {"ROUTER_KAFKA_PROPERTIES": '{"heartbeat.interval.ms": 500}'},
    # Here the brokers say how often: every second, by the properties that the tests' servers have.
    "consumer": {"ROUTER_KAFKA_GROUP_PROTOCOL": "consumer"},
}
"""By the group's protocol."""


class Unexpected(Exception):
    """Something of the deployment did what no fault asked of it, or did not do what a fault asked."""


class Engine:
    """The stub engine, killed and started again on its port."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._process: TiedProcess | None = None

    def start(self) -> None:
        keywords = orjson.dumps({label: f" {label}" for label in LABELS}).decode()
        command = [sys.executable, "-m", "tests.servers.stub_engine", "--port", str(self.port)]
        self._process = TiedProcess([*command, "--keywords", keywords], log=self._log)
        wait_until(lambda: http(f"{self.url}/ready")[0] == 200, "the stub engine answers", 30)
        self.tell(poison=POISON, refused=REFUSED)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def tell(self, **behaviour: object) -> Mapping[str, Any]:
        """Changes its behaviour; returns its counters. Raises OSError while it is away."""
        request = urllib.request.Request(f"{self.url}/_stub", orjson.dumps(behaviour), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: Mapping[str, Any] = orjson.loads(answer.read())["counters"]
            return found


class Worker:
    """One `ticket-router run`, started again and again."""

    def __init__(self, name: str, desk: Desk, settings: Mapping[str, str]) -> None:
        self.name = name
        self.log = desk.folder / f"{name}.log"
        self._desk = desk
        self._settings = settings
        self._port = 0
        self._process: TiedProcess | None = None

    def start(self) -> None:
        self._port = free_port()
        settings = {**self._desk.environment, **self._settings, "ROUTER_HTTP_PORT": str(self._port)}
        assignments = [f"{name}={value}" for name, value in settings.items()]
        command = ["env", *assignments, str(COMMAND), "run", "--rules", str(self._desk.folder)]
        self._process = TiedProcess(command, cwd=self._desk.folder, log=self.log)

    def status(self) -> Mapping[str, Any]:
        """Empty while it does not answer."""
        code, body = http(f"http://127.0.0.1:{self._port}/status")
        found: Mapping[str, Any] = orjson.loads(body) if code == 200 else {}
        return found

    def assigned(self) -> int:
        return int(self.status().get("assigned", 0))

    @property
    def ended(self) -> int | None:
        """The exit code of a process that nobody ended."""
        return self._process.returncode if self._process is not None else None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def terminate(self) -> None:
        """SIGTERM. Raises Unexpected where it does not exit with 0."""
        process, self._process = self._process, None
        assert process is not None
        code = process.stop(timeout_s=90.0)
        if code != 0:
            raise Unexpected(f"{self.name} exited with {code} after SIGTERM:\n{self.tail()}")

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3_000:] if self.log.exists() else ""


class Deployment:
    """One rule set on one Kafka, with everything that a worker talks to."""

    def __init__(self, folder: Path, nodes: int, group_protocol: str) -> None:
        self.folder = folder
        self._settings = {**WORKER_SETTINGS, **GROUP_SETTINGS[group_protocol]}
        self.nodes = nodes
        for name in [name for name in os.environ if name.startswith(("ROUTER_", "OTEL_"))]:
            del os.environ[name]  # the workers' settings are the run's own
        kafka = folder / "kafka"
        kafka.mkdir(parents=True)
        self.kafka = KafkaCluster(kafka, BROKER_PROPERTIES) if nodes == 3 else ApacheKafka(kafka, ONE_NODE_PROPERTIES)
        self.redis = RedisServer(str(folder))
        self.engine = Engine(folder / "engine.log")
        self.desk: Desk | None = None
        self.workers: list[Worker] = []
        self._extra = 0

    @property
    def bootstrap_servers(self) -> str:
        return self.kafka.bootstrap_servers

    @property
    def topics(self) -> Topics:
        return topics_of(self._desk().rules)

    @property
    def group(self) -> str:
        return f"ticket-router.{self._desk().rules.id}"

    def start(self) -> None:
        """Everything but the workers."""
        self.kafka.start()
        self.redis.start()
        self.engine.start()
        folder = self.folder / f"chaos{self.nodes}"
        folder.mkdir()
        self.desk = Desk(folder, self.bootstrap_servers, self.engine.url, partitions=PARTITIONS)
        self.workers = [self.worker(f"worker-{number}") for number in range(WORKERS)]

    def worker(self, name: str = "") -> Worker:
        """Not started. Without a name it is one more."""
        if not name:
            self._extra += 1
            name = f"extra-{self._extra}"
        return Worker(name, self._desk(), {**self._settings, "ROUTER_REDIS_URL": self.redis.url})

    def node(self, number: int) -> ApacheKafka:
        return self.kafka.nodes[number] if isinstance(self.kafka, KafkaCluster) else self.kafka

    @property
    def all_nodes(self) -> Sequence[ApacheKafka]:
        return tuple(self.kafka.nodes.values()) if isinstance(self.kafka, KafkaCluster) else (self.kafka,)

    def stop(self) -> None:
        """By force."""
        for worker in self.workers:
            worker.kill()
        self.engine.kill()
        self.redis.kill()
        self.kafka.kill()

    def _desk(self) -> Desk:
        assert self.desk is not None, "not started"
        return self.desk


def topics_of(rules: RuleSet) -> Topics:
    routes = {category.id: rules.categories.topic(category.id) for category in rules.categories.routable}
    return Topics(rules.input_topic, rules.human_topic, rules.dead_letter_topic, rules.decisions_topic, routes)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Raises Unexpected."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            raise Unexpected(f"{timeout_s:g} s passed, and it is not so that {what}")
        time.sleep(0.1)
