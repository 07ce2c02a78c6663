"""A real Apache Kafka on free ports of 127.0.0.1, for as long as a test needs it: Maven's jars on Java 17."""

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
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from worker.adapters.tied_process import TiedProcess

POM = Path(__file__).with_name("pom.xml")
CACHE = Path(__file__).parents[2] / ".cache" / "kafka"
READY = "Kafka Server started"
START_TIMEOUT_S = 90.0
COPY_TIMEOUT_S = 600.0
JAVA_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=INFO")


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


class ApacheKafka:
    """One node, broker and controller. Its ports and data stay the same over stop, kill and start."""

    def __init__(
        self, folder: Path, properties: Mapping[str, str] | None = None, users: Mapping[str, str] | None = None
    ) -> None:
        """`properties` are the server's own and win over the ones here. With `users` (name to password) clients come
        in by SASL_PLAINTEXT, mechanism PLAIN."""
        self._libraries = kafka_libraries()
        self._folder = folder
        self._log = folder / "server.log"
        self._settings = folder / "server.properties"
        self._process: TiedProcess | None = None
        port, controller_port = _free_ports(2)
        self.bootstrap_servers = f"127.0.0.1:{port}"
        door = "SASL_PLAINTEXT" if users else "PLAINTEXT"
        listeners = f"{door}://{self.bootstrap_servers},CONTROLLER://127.0.0.1:{controller_port}"
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
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
            **(_password_door(users) if users else {}),
            **(properties or {}),
        }
        self._settings.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        tool = ["kafka.tools.StorageTool", "format", "--standalone", "-t", f"A{cluster[1:]}", "-c", str(self._settings)]
        formatted = subprocess.run(self._java(*tool), capture_output=True, text=True, timeout=120, check=False)
        if formatted.returncode != 0:
            raise RuntimeError(f"Kafka's storage cannot be formatted:\n{formatted.stdout}{formatted.stderr}")

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Returns once the server says that it has started (the port opens earlier)."""
        seen = self._log.stat().st_size if self._log.exists() else 0
        self._process = TiedProcess(self._java("kafka.Kafka", str(self._settings)), log=self._log)
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            with self._log.open(errors="replace") as log:
                log.seek(seen)
                output = log.read()
            if READY in output:
                return
            if self._process.returncode is not None:
                raise RuntimeError(f"Kafka ended with code {self._process.returncode}:\n{output[-3000:]}")
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
        """SIGSTOP: connections stay open and nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

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
        return ["java", *JAVA_OPTIONS, "-cp", f"{self._libraries}/*", *arguments]


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
