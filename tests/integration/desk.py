"""A whole deployment for tests: rule set, stub engine, and worker processes of the installed command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import yaml

from tests.core.sets import artefact, category_set
from tests.servers.redis_server import free_port
from tests.waiting import wait_for
from worker.adapters.files import load_rule_set
from worker.adapters.kafka_client import KafkaConfig
from worker.adapters.kafka_topics import create_topics
from worker.adapters.sglang import SGLangEngine
from worker.adapters.topic_log import ClientProperties, Record, TopicReader, TopicWriter
from worker.core.rules import RuleSet
from worker.ports import Output
from worker.runtime.question import prepare_question

LABELS = ("billing", "login", "bug")
COMMAND = Path(sys.executable).with_name("ticket-router")


class StubProcess:
    """The stub engine as a process that can be killed and started again on its port."""

    def __init__(self, port: int | None = None, latency_s: float = 0.01) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._latency_s = latency_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        keywords = orjson.dumps({label: f" {label}" for label in LABELS}).decode()
        command = [sys.executable, "-m", "tests.servers.stub_engine", "--port", str(self.port)]
        command += ["--keywords", keywords, "--latency-s", str(self._latency_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(lambda: http(f"{self.url}/ready")[0] == 200, "the stub engine")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def tell(self, **behaviour: object) -> dict[str, Any]:
        """Changes its behaviour; returns counters and behaviour."""
        request = urllib.request.Request(f"{self.url}/_stub", orjson.dumps(behaviour), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = orjson.loads(answer.read())
            return found

    def __enter__(self) -> StubProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class WorkerProcess:
    """One `ticket-router run`. Standard output goes to `log_to`, if that is given, and not to its log file."""

    def __init__(self, desk: Desk, *, log_to: int | None = None, **settings: object) -> None:
        self.port = free_port()
        self._desk = desk
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ROUTER_", "OTEL_"))},
            **desk.environment,
            "ROUTER_HTTP_PORT": str(self.port),
            **{f"ROUTER_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.log = desk.folder / f"worker-{self.port}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(COMMAND), "run", "--rules", str(desk.folder)],
                env=environment,
                stdout=log if log_to is None else log_to,
                stderr=log,
                cwd=desk.folder,
            )

    def ready(self) -> bool:
        return http(f"http://127.0.0.1:{self.port}/readyz")[0] == 200

    def status(self) -> dict[str, Any]:
        code, body = http(f"http://127.0.0.1:{self.port}/status")
        return orjson.loads(body) if code == 200 else {}

    def wait_ready(self) -> WorkerProcess:
        wait_for(lambda: self.ready() or self.process.poll() is not None, f"readiness; {self.tail()}", 90)
        assert self.process.poll() is None, self.tail()
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self, timeout_s: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


class Desk:
    """A rule set folder with a calibration that fits the stub engine, its topics, and what became of its tickets."""

    def __init__(
        self,
        folder: Path,
        bootstrap_servers: str,
        engine_url: str,
        partitions: int = 3,
        *,
        properties: ClientProperties | None = None,
    ) -> None:
        """`properties` are those of the Kafka clients of the desk itself, not of its workers."""
        self.folder = folder
        self.bootstrap_servers = bootstrap_servers
        name = re.sub(r"\W", "", folder.name).lower()[-20:]
        base = category_set(*LABELS).model_copy(update={"id": f"d{name}"})
        self._write("categories.yaml", base.model_dump(mode="json", exclude_defaults=True))
        self._write("rules.yaml", {"version": 1, "alpha": 0.1, "delta": 0.1})
        self.rules: RuleSet = load_rule_set(folder)
        self.calibrate(engine_url)
        self.environment = {
            "ROUTER_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
            "ROUTER_KAFKA_SESSION_TIMEOUT_MS": "6000",
            "ROUTER_ENGINE_URL": engine_url,
            "ROUTER_CACHE_SECRET": "a secret for the tests only",
        }
        topics = dict.fromkeys((self.rules.input_topic, *self.rules.output_topics), partitions)
        self._properties = dict(properties or {})
        create_topics(
            KafkaConfig(bootstrap_servers, self.rules.input_topic, "tests", properties=self._properties), topics
        )
        self._writer = TopicWriter(bootstrap_servers, self._properties)

    def calibrate(self, engine_url: str) -> None:
        """Writes an artefact with the fingerprints of what runs; its numbers are made up."""

        async def fingerprints() -> Any:
            engine = SGLangEngine(engine_url)
            try:
                return (await prepare_question(self.rules, engine)).fingerprints
            finally:
                await engine.aclose()

        made = artefact(self.rules, fingerprints=asyncio.run(fingerprints()))
        (self.folder / "calibration.json").write_bytes(made.to_bytes())

    def _write(self, name: str, content: object) -> None:
        (self.folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def send(self, count: int, *, first: int = 0, keys: int = 50) -> list[str]:
        """Tickets that name their category; their ids."""
        ids = [f"t{n}" for n in range(first, first + count)]
        for n, ticket_id in enumerate(ids, first):
            body = orjson.dumps({"id": ticket_id, "text": f"ticket {n}: trouble with {LABELS[n % 3]}"})
            self._writer.write(Output(self.rules.input_topic, f"k{n % keys}".encode(), body))
        self._writer.flush(60)
        return ids

    def send_raw(self, value: bytes | None) -> None:
        self._writer.write(Output(self.rules.input_topic, None, value))
        self._writer.flush(60)

    @contextlib.contextmanager
    def worker(self, **settings: object) -> Iterator[WorkerProcess]:
        """A worker that is ready inside the block."""
        process = WorkerProcess(self, **settings)
        try:
            yield process.wait_ready()
        finally:
            process.kill()

    def records(self, *topics: str) -> list[Record]:
        reader = TopicReader(self.bootstrap_servers, self._properties)
        try:
            return list(reader.records(topics or self.ends))
        finally:
            reader.close()

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(topic for topic in self.rules.output_topics if topic != self.rules.decisions_topic)

    def found(self) -> Mapping[str, list[str]]:
        """Ticket id to the topics in which it ended, one for each copy."""
        found: dict[str, list[str]] = defaultdict(list)
        for record in self.records():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found[orjson.loads(record.value or b"")["id"]].append(record.partition.topic)
        return found

    def wait_for_all(self, ids: list[str], timeout_s: float = 120) -> Mapping[str, list[str]]:
        """Until every id is in an output topic. Fails with what is missing."""
        until = time.monotonic() + timeout_s
        while True:
            found = self.found()
            missing = [i for i in ids if i not in found]
            if not missing:
                return found
            assert time.monotonic() < until, f"{len(missing)} of {len(ids)} tickets missing, such as {missing[:5]}"
            time.sleep(0.5)


def http(url: str) -> tuple[int, bytes]:
    """Status and body; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""
