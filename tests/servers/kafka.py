"""A real Apache Kafka on free ports of 127.0.0.1, one node or three, for as long as a test needs it: Maven's jars on
Java 17."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.servers.tls import Authority
from tests.waiting import wait_for
from worker.adapters.tied_process import TiedProcess

POM = Path(__file__).with_name("pom.xml")
CACHE = Path(__file__).parents[2] / ".cache" / "kafka"
READY = "Kafka Server started"
START_TIMEOUT_S = 90.0
COPY_TIMEOUT_S = 600.0
JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=INFO")
HEAP_MB = 512
HEAP_OF_THREE_MB = 384


def kafka_libraries() -> Path:
    """The folder with the jars, filled on the first call. Without Java or Maven: a failure in CI, a skip elsewhere."""
    libraries = CACHE / hashlib.sha256(POM.read_bytes()).hexdigest()[:12]
    missing = [program for program in ("java", "mvn") if shutil.which(program) is None]
    if "java" in missing or (missing and not libraries.is_dir()):
        problem = f"no Apache Kafka for the tests: {' and '.join(missing)} not found (Java 17 or newer, Maven)"
        if "CI" in os.environ:
            pytest.fail(problem)
        pytest.skip(problem)
    if not libraries.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            fresh = Path(folder) / "libraries"
            goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={fresh}"]
            command = ["mvn", "-q", "-B", "-f", str(POM), *goal]
            copied = subprocess.run(command, capture_output=True, text=True, timeout=COPY_TIMEOUT_S, check=False)
            if copied.returncode != 0:
                pytest.fail(f"Maven could not fetch Apache Kafka:\n{copied.stdout[-2000:]}{copied.stderr[-2000:]}")
            try:
                fresh.rename(libraries)
            except OSError:  # another run was faster
                assert libraries.is_dir()
    return libraries


@dataclass(frozen=True, slots=True)
class _Seat:
    """A node's place in its cluster. `voters` are all controllers; None where this node is the only one."""

    cluster: str
    node: int
    port: int
    controller_port: int
    voters: str | None


class ApacheKafka:
    """One node, broker and controller. Its ports and data stay the same over stop, kill and start."""

    def __init__(
        self,
        folder: Path,
        properties: Mapping[str, str] | None = None,
        users: Mapping[str, str] | None = None,
        *,
        tls: Authority | None = None,
        seat: _Seat | None = None,
        heap_mb: int = HEAP_MB,
    ) -> None:
        """`properties` are the server's own and win over the ones here. With `users` (name to password) clients come
        in by SASL_PLAINTEXT, mechanism PLAIN; with `tls` as well by SASL_SSL, mechanism SCRAM-SHA-512. The first user
        is the broker's own. A `seat` is given by KafkaCluster."""
        self._libraries = kafka_libraries()
        self._heap_mb = heap_mb
        self._folder = folder
        self._log = folder / "server.log"
        self._settings = folder / "server.properties"
        self._process: TiedProcess | None = None
        self._seen = 0
        if seat is None:
            port, controller_port = _free_ports(2)
            seat = _Seat(_cluster_id(), 1, port, controller_port, None)
        controller = f"127.0.0.1:{seat.controller_port}"
        self.bootstrap_servers = f"127.0.0.1:{seat.port}"
        door = ("SASL_SSL" if tls else "SASL_PLAINTEXT") if users else "PLAINTEXT"
        listeners = f"{door}://{self.bootstrap_servers},CONTROLLER://{controller}"
        quorum = (
            {"controller.quorum.voters": seat.voters}
            if seat.voters
            else {"controller.quorum.bootstrap.servers": controller}
        )
        settings = {
            "process.roles": "broker,controller",
            "node.id": str(seat.node),
            **quorum,
            "listeners": listeners,
            "advertised.listeners": listeners,
            "inter.broker.listener.name": door,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,{door}:{door}",
            "log.dirs": str(folder / "data"),
            "auto.create.topics.enable": "false",
            "num.partitions": "4",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "group.consumer.heartbeat.interval.ms": "1000",
            "group.consumer.min.heartbeat.interval.ms": "1000",
            "group.consumer.min.session.timeout.ms": "6000",
            "group.consumer.session.timeout.ms": "6000",
            **((_guarded_door(users, tls) if tls else _password_door(users)) if users else {}),
            **(properties or {}),
        }
        self._settings.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        tool = ["kafka.tools.StorageTool", "format", "-t", seat.cluster, "-c", str(self._settings)]
        tool += [] if seat.voters else ["--standalone"]
        for name, password in (users or {}).items() if tls else ():
            tool += ["--add-scram", f"SCRAM-SHA-512=[name={name},password={password}]"]
        formatted = subprocess.run(self._java(*tool), capture_output=True, text=True, timeout=120, check=False)
        if formatted.returncode != 0:
            raise RuntimeError(f"Kafka's storage cannot be formatted:\n{formatted.stdout}{formatted.stderr}")

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Returns once the server says that it has started (the port opens earlier)."""
        self.launch()
        self.wait_started()

    def launch(self) -> None:
        """Starts it and returns: one of three waits for another before it has started."""
        self._seen = self._log.stat().st_size if self._log.exists() else 0
        self._process = TiedProcess(self._java("kafka.Kafka", str(self._settings)), log=self._log)

    def wait_started(self) -> None:
        process, output = self._running(), ""
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            with self._log.open(errors="replace") as log:
                log.seek(self._seen)
                output = log.read()
            if READY in output:
                return
            if process.returncode is not None:
                raise RuntimeError(f"Kafka ended with code {process.returncode}:\n{output[-3000:]}")
            time.sleep(0.1)
        self.kill()
        raise RuntimeError(f"Kafka did not start within {START_TIMEOUT_S:g} s:\n{output[-3000:]}")

    def stop(self) -> None:
        """SIGTERM: an orderly end."""
        if self._process is not None:
            self._process.stop(timeout_s=30.0)
            self._process = None

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered. Returns once all of its threads stand still: on a
        loaded machine one of them could acknowledge a batch after the signal."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{process.pid}/task")
        wait_for(lambda: all(_stands_still(thread) for thread in threads.iterdir()), "Kafka to stand still")

    def thaw(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Nothing of a test's broker is worth an orderly end.
        self.kill()

    def _running(self) -> TiedProcess:
        if self._process is None:
            raise RuntimeError("Kafka does not run")
        return self._process

    def _java(self, *arguments: str) -> list[str]:
        return ["java", f"-Xmx{self._heap_mb}m", *JAVA_OPTIONS, "-cp", f"{self._libraries}/*", *arguments]


def _stands_still(thread: Path) -> bool:
    """By the third field of its proc(5) stat, behind a name in brackets. One that is gone is as still."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


class KafkaCluster:
    """Three nodes, each broker and controller, that can be killed and started singly.

    Every topic has a copy on each, and a write needs two of them: one node may be away.
    """

    def __init__(self, folder: Path, properties: Mapping[str, str] | None = None) -> None:
        """`properties` are those of every node."""
        kafka_libraries()  # fetched once, not by three at once
        numbers = (1, 2, 3)
        ports = _free_ports(6)
        voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in zip(numbers, ports[3:], strict=True))
        cluster = _cluster_id()
        settings = {
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "offsets.topic.replication.factor": "3",
            "transaction.state.log.replication.factor": "3",
            "transaction.state.log.min.isr": "2",
            "share.coordinator.state.topic.replication.factor": "3",
            "share.coordinator.state.topic.min.isr": "2",
            # A node that is killed leads until its session ends, and cannot come back before (9 s by default).
            "broker.session.timeout.ms": "5000",
            "broker.heartbeat.interval.ms": "500",
            **(properties or {}),
        }

        def node(number: int) -> ApacheKafka:
            own = folder / f"node-{number}"
            own.mkdir()
            seat = _Seat(cluster, number, ports[number - 1], ports[number + 2], voters)
            return ApacheKafka(own, settings, seat=seat, heap_mb=HEAP_OF_THREE_MB)

        with ThreadPoolExecutor() as pool:
            self.nodes: Mapping[int, ApacheKafka] = dict(zip(numbers, pool.map(node, numbers), strict=True))
        self.bootstrap_servers = ",".join(each.bootstrap_servers for each in self.nodes.values())
        self._admin: AdminClient | None = None

    def start(self) -> None:
        """All three. Returns when each has started."""
        for node in self.nodes.values():
            node.launch()
        for node in self.nodes.values():
            node.wait_started()

    def kill(self) -> None:
        """SIGKILL to all three."""
        for node in self.nodes.values():
            node.kill()

    def leader(self, topic: str, partition: int = 0) -> int:
        """The node that leads this partition; -1 for none."""
        found = self._ask(lambda admin: admin.list_topics(topic, timeout=10))
        return int(found.topics[topic].partitions[partition].leader)

    def coordinator(self, group: str) -> int:
        """The node at which the group's members report, and which keeps its offsets."""
        found = self._ask(lambda admin: admin.describe_consumer_groups([group])[group].result(30))
        return int(found.coordinator.id)

    def wait_in_sync(self, timeout_s: float = 60.0) -> None:
        """Until every partition of every topic has all its copies in step: then another node may go."""
        until = time.monotonic() + timeout_s
        while True:
            topics = self._ask(lambda admin: admin.list_topics(timeout=10)).topics.values()
            behind = [
                f"{topic.topic}/{number}"
                for topic in topics
                for number, partition in topic.partitions.items()
                if partition.leader < 0 or len(partition.isrs) < len(partition.replicas)
            ]
            if not behind:
                return
            if time.monotonic() >= until:
                raise RuntimeError(f"after {timeout_s:g} s copies are still behind: {', '.join(behind[:5])}")
            time.sleep(0.2)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _ask(self, question: Callable[[AdminClient], Any]) -> Any:
        """Again where a node is on its way out or in. Raises KafkaException."""
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap_servers}, logger=_SILENT)
        for _ in range(10):
            try:
                return question(self._admin)
            except KafkaException:
                time.sleep(0.5)
        return question(self._admin)


class _Silent:
    """The client logs to standard error unless it is given a logger."""

    def log(self, *_: object) -> None: ...


_SILENT = _Silent()


def _cluster_id() -> str:
    """Kafka takes a leading dash for an option."""
    return "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]


def _password_door(users: Mapping[str, str]) -> Mapping[str, str]:
    name, password = next(iter(users.items()))
    known = " ".join(f'user_{user}="{secret}"' for user, secret in users.items())
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return {
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
            f'{module} required username="{name}" password="{password}" {known};'
        ),
    }


def _guarded_door(users: Mapping[str, str], tls: Authority) -> Mapping[str, str]:
    """The users themselves are written into the storage when it is formatted."""
    name, password = next(iter(users.items()))
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    return {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
            f'{module} required username="{name}" password="{password}";'
        ),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(tls.chain),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(tls.authority),
    }


def _free_ports(count: int) -> list[int]:
    """All held open together, so that they differ."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
