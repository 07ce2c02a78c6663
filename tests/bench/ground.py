"""The ground that contestants run on: a broker with tickets, a rule set that fits the stub engine, a worker."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import orjson
import yaml
from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.bench.tickets import CATEGORIES
from tests.core.sets import artefact, category_set
from tests.integration.desk import http, wait_for
from tests.servers.redis_server import free_port
from worker.adapters.embedded import EmbeddedBroker
from worker.adapters.files import load_rule_set
from worker.adapters.kafka_client import KafkaConfig
from worker.adapters.kafka_topics import create_topics
from worker.adapters.sglang import SGLangEngine
from worker.adapters.topic_log import TopicWriter
from worker.core.rules import RuleSet
from worker.ports import Output
from worker.runtime.question import Question, prepare_question

ROOT = Path(__file__).parents[2]
PARTITIONS = 4
MOCK_PARTITIONS = 24
"""The mock cluster keeps 5 MiB of each: some 18,000 tickets, read or not, and what is beyond is gone."""


@dataclass
class Broker:
    """Where tickets lie. `create` makes topics with `partitions` partitions."""

    name: str
    bootstrap_servers: str
    partitions: int
    create: Callable[[str], object]

    def fill(self, topic: str, values: Iterable[bytes]) -> int:
        """Creates the topic and writes the tickets; says how many."""
        self.create(topic)
        writer = TopicWriter(self.bootstrap_servers)
        count = 0
        for count, value in enumerate(values, 1):
            writer.write(Output(topic, f"k{count % 997}".encode(), value))
        writer.flush(120)
        return count


@contextmanager
def mock_broker() -> Iterator[Broker]:
    with EmbeddedBroker() as broker:
        yield Broker(
            "librdkafka's mock broker",
            broker.bootstrap_servers,
            MOCK_PARTITIONS,
            lambda topic: broker.create_topic(topic, MOCK_PARTITIONS),
        )


def apache_broker(bootstrap_servers: str) -> Broker:
    config = KafkaConfig(bootstrap_servers, "any", "bench")
    return Broker(
        "Apache Kafka", bootstrap_servers, PARTITIONS, lambda topic: create_topics(config, {topic: PARTITIONS})
    )


class Written:
    """Counts the messages in some topics by their ends."""

    def __init__(self, broker: Broker, topics: Sequence[str]) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": broker.bootstrap_servers, "group.id": "bench-counts", "log_level": 0}
        )
        self._partitions = [TopicPartition(topic, n) for topic in topics for n in range(broker.partitions)]

    def __call__(self) -> int:
        return sum(self._end(partition) for partition in self._partitions)

    def _end(self, partition: TopicPartition) -> int:
        for _ in range(50):
            try:
                return int(self._consumer.get_watermark_offsets(partition, timeout=30)[1])
            except KafkaException:  # a topic that was just made has no leader yet
                time.sleep(0.1)
        raise RuntimeError(f"the end of {partition.topic} is not known")

    def close(self) -> None:
        self._consumer.close()


class RuleFolder:
    """A rule set with a calibration that fits the stub engine; tickets of its own topics."""

    def __init__(
        self,
        folder: Path,
        name: str,
        engine_url: str,
        *,
        by_field: bool = False,
        categories: Sequence[str] = CATEGORIES,
    ) -> None:
        """`by_field`: a rule routes every ticket by its metadata, and nothing is scored."""
        self.folder = folder / name
        self.folder.mkdir()
        base = category_set(*categories).model_copy(update={"id": f"bench_{name}"})
        self._write("categories.yaml", base.model_dump(mode="json", exclude_defaults=True))
        overrides = [
            {
                "kind": "field",
                "name": f"queue {category}",
                "pointer": "/queue",
                "equals": category,
                "then": "route",
                "category": category,
            }
            for category in categories
        ]
        rules = {"version": 1, "alpha": 0.1, "delta": 0.1, **({"overrides": overrides} if by_field else {})}
        self._write("rules.yaml", rules)
        self.rules: RuleSet = load_rule_set(self.folder)

        async def question() -> Question:
            engine = SGLangEngine(engine_url)
            try:
                return await prepare_question(self.rules, engine)
            finally:
                await engine.aclose()

        self.question = asyncio.run(question())
        made = artefact(self.rules, fingerprints=self.question.fingerprints)
        (self.folder / "calibration.json").write_bytes(made.to_bytes())

    @property
    def ticket_topics(self) -> list[str]:
        """Where tickets end: one message each."""
        return [topic for topic in self.rules.output_topics if topic != self.rules.decisions_topic]

    def create_topics(self, broker: Broker) -> None:
        for topic in self.rules.output_topics:
            broker.create(topic)

    def _write(self, name: str, content: object) -> None:
        (self.folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


class Process:
    """A contestant: a process of its own, whose output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=ROOT, env={**os.environ, **(environment or {})}
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


@dataclass
class Worker:
    """One `ticket-router run` of the installed command, its log lines written to a file."""

    folder: RuleFolder
    broker: Broker
    engine_url: str
    input_topic: str
    collector_url: str
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = free_port()
        environment = {
            "ROUTER_KAFKA_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
            "ROUTER_KAFKA_INPUT_TOPIC": self.input_topic,
            "ROUTER_KAFKA_SESSION_TIMEOUT_MS": "6000",
            "ROUTER_KAFKA_ASSIGNMENT_STRATEGY": "range",
            "ROUTER_ENGINE_URL": self.engine_url,
            "ROUTER_CACHE_SECRET": "a secret for the benchmarks only",
            "ROUTER_HTTP_PORT": str(self.port),
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector_url,
            **{f"ROUTER_{name.upper()}": str(value) for name, value in self.settings.items()},
        }
        kept = {name: "" for name in os.environ if name.startswith(("ROUTER_", "OTEL_")) and name not in environment}
        command = [
            sys.executable,
            "-c",
            "from worker.cli import main; main()",
            "run",
            "--rules",
            str(self.folder.folder),
        ]
        self.process = Process(command, self.folder.folder / f"worker-{self.port}.log", {**kept, **environment})

    def status(self) -> dict[str, Any]:
        code, body = http(f"http://127.0.0.1:{self.port}/status")
        found: dict[str, Any] = orjson.loads(body) if code == 200 else {}
        return found

    def settled(self) -> int:
        return int(self.status().get("settled", 0))

    def wait_listening(self) -> None:
        wait_for(lambda: bool(self.status()) or self.process.ended, "the worker", 90)
        assert not self.process.ended, self.process.tail()

    def kill(self) -> None:
        self.process.kill()

    def __enter__(self) -> Worker:
        self.wait_listening()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class _Collector(BaseHTTPRequestHandler):
    """Takes spans and metrics, and says thank you."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def collector() -> Iterator[str]:
    """Where a worker sends its sampled spans and its metrics; the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
