"""What surrounds the Kafka stream: client properties, log lines, troubles, topics, passwords."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError

from tests.servers.faulty_broker import FaultyBroker
from tests.servers.kafka import ApacheKafka
from worker.adapters.kafka import KafkaConfig, KafkaStream
from worker.adapters.kafka_client import (
    GUARDED_PROPERTIES,
    BrokerTrouble,
    RationedLog,
    consumer_properties,
    producer_properties,
)
from worker.adapters.kafka_topics import create_topics, describe_topics, require_topics
from worker.errors import ConfigError, StreamFatal
from worker.ports import AssignmentListener, Settlement

QUIET = logging.getLogger("tests.kafka-client")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False


class Deaf:
    """A listener that does nothing."""

    def assigned(self, *_: object) -> None: ...

    def revoking(self, *_: object) -> Settlement:
        return Settlement()

    def released(self, *_: object) -> None: ...

    def lost(self, *_: object) -> None: ...

    def gap(self, gap: object) -> None: ...


LISTENER: AssignmentListener = Deaf()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def config(servers: str = "127.0.0.1:1", **more: object) -> KafkaConfig:
    return KafkaConfig(servers, "tickets", "group", **more)  # type: ignore[arg-type]


class TestProperties:
    @pytest.mark.parametrize("name", sorted(GUARDED_PROPERTIES))
    def test_nobody_can_unset_what_delivery_depends_on(self, name: str) -> None:
        with pytest.raises(ConfigError, match=name):
            consumer_properties(config(properties={name: "x"}))

    def test_tls_settings_reach_both_clients(self) -> None:
        chosen = config(properties={"security.protocol": "SSL", "ssl.ca.location": "/ca.pem"})
        for properties in (consumer_properties(chosen), producer_properties(chosen)):
            assert properties["ssl.ca.location"] == "/ca.pem"

    def test_kip_848_leaves_to_the_broker_what_is_the_brokers(self) -> None:
        properties = consumer_properties(config(group_protocol="consumer"))
        assert not {"session.timeout.ms", "partition.assignment.strategy"} & set(properties)

    def test_added_partitions_are_seen_within_half_a_minute_unless_somebody_wants_it_otherwise(self) -> None:
        name = "topic.metadata.refresh.interval.ms"
        assert consumer_properties(config())[name] == 30_000
        assert consumer_properties(config(properties={name: 5_000}))[name] == 5_000

    def test_passwords_do_not_show(self) -> None:
        assert "hunter2" not in repr(config(properties={"sasl.password": "hunter2"}))

    def test_an_unknown_property_is_named(self) -> None:
        stream = KafkaStream(config(properties={"no.such.thing": "1"}), QUIET)
        with pytest.raises(ConfigError, match=r"no\.such\.thing"):
            stream.open(LISTENER)
        with pytest.raises(ConfigError, match=r"no\.such\.thing"):
            describe_topics(config(properties={"no.such.thing": "1"}), ["t"])


class TestRationedLog:
    def test_a_line_comes_once_a_minute_and_says_how_many_were_like_it(self, caplog: pytest.LogCaptureFixture) -> None:
        clock = Clock()
        log = RationedLog(logging.getLogger("rationed"), clock)
        for port in range(50):
            log.log(logging.ERROR, "%s [%s] connect to 127.0.0.1:%d failed", "FAIL", "client-1", port)
        log.log(logging.WARNING, "something else")
        assert len(caplog.messages) == 2
        clock.now += 61
        log.log(logging.ERROR, "%s [%s] connect to 127.0.0.1:%d failed", "FAIL", "client-1", 7)
        assert "49 more" in caplog.messages[-1]

    def test_what_befalls_another_partition_is_another_line(self, caplog: pytest.LogCaptureFixture) -> None:
        log = RationedLog(logging.getLogger("rationed"), Clock())
        for _ in range(2):
            for partition in range(3):
                log.log(logging.WARNING, "tickets [%d]: offset reset (at offset %d)", partition, 150 + partition)
        assert [message[:11] for message in caplog.messages] == ["tickets [0]", "tickets [1]", "tickets [2]"]

    def test_memory_stays_bounded(self) -> None:
        log = RationedLog(QUIET, Clock())
        for number in range(10_000):
            log.log(logging.DEBUG, "x" * (number + 1))
        assert len(log._last) <= 256

    def test_nothing_goes_to_standard_error(self, embedded_broker: FaultyBroker) -> None:
        embedded_broker.create_topic("tickets", 1)
        script = (
            "import logging, sys\n"
            "from tests.adapters.test_kafka_client import LISTENER, config\n"
            "from worker.adapters.kafka import KafkaStream\n"
            "quiet = logging.getLogger('quiet'); quiet.addHandler(logging.NullHandler()); quiet.propagate = False\n"
            "for servers in sys.argv[1:]:\n"
            "    stream = KafkaStream(config(servers, connect_timeout_s=1.0, properties={'debug': 'broker'}), quiet)\n"
            "    try:\n"
            "        stream.open(LISTENER)\n"
            "        for _ in range(5):\n"
            "            stream.poll(1, 0.05)\n"
            "    except Exception as error:\n"
            "        print(type(error).__name__)\n"
            "    stream.close()\n"
        )
        command = [sys.executable, "-c", script, embedded_broker.bootstrap_servers, "127.0.0.1:1"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
        assert ended.stderr == ""
        assert ended.stdout == "ConfigError\n"


class TestBrokerTrouble:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def trouble(self, clock: Callable[[], float]) -> BrokerTrouble:
        return BrokerTrouble(config(), clock, after_s=3.0)

    def test_is_told_once_it_has_lasted(self, trouble: BrokerTrouble, clock: Clock) -> None:
        trouble.report(KafkaError(KafkaError._TRANSPORT, "Connection refused"))
        assert not trouble.suspected, "a single connection may go at any time"
        trouble.report(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
        assert trouble.sentence() is None
        clock.now += 2
        trouble.report(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
        clock.now += 2
        assert "Connection refused" in (trouble.sentence() or "")
        trouble.answered()
        assert trouble.sentence() is None

    def test_wrong_credentials_are_the_reason_that_is_told(self, trouble: BrokerTrouble, clock: Clock) -> None:
        trouble.report(KafkaError(KafkaError._AUTHENTICATION, "Invalid username or password"))
        trouble.report(KafkaError(KafkaError._TRANSPORT, "Disconnected"))
        trouble.report(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
        clock.now += 5
        assert "Invalid username" in (trouble.sentence() or "")
        assert trouble.unreachable

    def test_a_missing_permission_is_not_over_because_a_broker_answers(
        self, trouble: BrokerTrouble, clock: Clock
    ) -> None:
        trouble.report(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED, "Group authorization failed"))
        clock.now += 5
        trouble.answered()
        assert "Group authorization failed" in (trouble.sentence() or "")
        trouble.working()
        assert trouble.sentence() is None

    def test_a_group_that_refuses_this_member_is_named_until_it_lets_it_in(
        self, trouble: BrokerTrouble, clock: Clock
    ) -> None:
        """The client says so once and goes on trying; that brokers answer ends nothing."""
        trouble.report(KafkaError(KafkaError.INCONSISTENT_GROUP_PROTOCOL, "Inconsistent group protocol"))
        clock.now += 5
        trouble.answered()
        assert "ROUTER_KAFKA_ASSIGNMENT_STRATEGY" in (trouble.sentence() or "")
        trouble.working()
        assert trouble.sentence() is None


class TestTopics:
    def test_those_that_exist_are_counted_and_none_is_created_by_asking(self, embedded_broker: FaultyBroker) -> None:
        embedded_broker.create_topic("tickets", 3)
        chosen = config(embedded_broker.bootstrap_servers)
        for _ in range(2):
            assert describe_topics(chosen, ["tickets", "missing", "tickets"]) == {"tickets": 3}

    def test_a_broker_that_does_not_answer_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1.*refused"):
            describe_topics(config(), ["t"], timeout_s=1.0)

    @pytest.mark.kafka
    def test_outputs_that_are_missing_at_the_start_are_all_named(self, apache_kafka: ApacheKafka) -> None:
        chosen = replace(config(apache_kafka.bootstrap_servers), input_topic="start-in")
        create_topics(chosen, {"start-in": 1, "start-a": 1}, 1)
        with pytest.raises(ConfigError, match=r"missing on .*: 'start-b', 'start-c'\. .*topics --create"):
            require_topics(chosen, ["start-a", "start-b", "start-c"])
        create_topics(chosen, {"start-b": 1, "start-c": 1}, 1)
        require_topics(chosen, ["start-a", "start-b", "start-c"])
        with pytest.raises(ConfigError, match="input topic 'start-no' cannot be read"):
            require_topics(replace(chosen, input_topic="start-no"), ["start-a"])

    def test_a_broker_that_creates_topics_by_itself_may_create_the_outputs(self, embedded_broker: FaultyBroker) -> None:
        """As the first record would; the input topic is still nothing that asking may create."""
        embedded_broker.create_topic("tickets", 1)
        chosen = config(embedded_broker.bootstrap_servers)
        require_topics(chosen, ["made", "too"])
        assert set(describe_topics(chosen, ["made", "too"])) == {"made", "too"}

    def test_a_start_without_brokers_says_so(self) -> None:
        with pytest.raises(ConfigError, match=r"input topic 'tickets'.*127\.0\.0\.1:1.*refused"):
            require_topics(config(connect_timeout_s=1.0), ["out"])

    @pytest.mark.kafka
    def test_missing_ones_are_created_once(self, apache_kafka: ApacheKafka) -> None:
        chosen = config(apache_kafka.bootstrap_servers)
        assert create_topics(chosen, {"created-a": 2}, 1) == ("created-a",)
        assert create_topics(chosen, {"created-a": 2, "created-b": 1}, settings={"retention.ms": "3600000"}) == (
            "created-b",
        )
        assert describe_topics(chosen, ["created-a", "created-b"]) == {"created-a": 2, "created-b": 1}
        assert create_topics(chosen, {}) == ()

    @pytest.mark.kafka
    def test_what_the_broker_says_against_a_topic_is_told(self, apache_kafka: ApacheKafka) -> None:
        with pytest.raises(ConfigError, match=r"created-c.*[Rr]eplication"):
            create_topics(config(apache_kafka.bootstrap_servers), {"created-c": 1}, 5)


def with_password(server: ApacheKafka, password: str = "secret", **more: object) -> KafkaConfig:
    login = {"sasl.mechanism": "PLAIN", "sasl.username": "router", "sasl.password": password}
    return config(server.bootstrap_servers, properties={"security.protocol": "SASL_PLAINTEXT", **login}, **more)


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """With passwords, without KIP-848."""
    folder = tmp_path_factory.mktemp("guarded-kafka")
    classic_only = {"group.coordinator.rebalance.protocols": "classic"}
    with ApacheKafka(folder, classic_only, users={"router": "secret"}) as server:
        create_topics(with_password(server), {"tickets": 1}, 1)
        yield server


@pytest.mark.kafka
class TestGuardedBroker:
    def test_the_right_password_lets_in(self, guarded_server: ApacheKafka) -> None:
        stream = KafkaStream(with_password(guarded_server, session_timeout_ms=6_000), QUIET)
        stream.open(LISTENER)
        until = time.monotonic() + 40
        while not stream.assignment():
            stream.poll(1, 0.1)
            assert time.monotonic() < until
        stream.close()

    def test_a_wrong_password_is_the_reason_given_at_the_start(self, guarded_server: ApacheKafka) -> None:
        stream = KafkaStream(with_password(guarded_server, password="wrong", connect_timeout_s=3.0), QUIET)
        before = time.monotonic()
        with pytest.raises(ConfigError, match=r"tickets.*(?i:invalid username or password)"):
            stream.open(LISTENER)
        assert time.monotonic() - before < 30.0
        stream.close()

    def test_a_broker_without_kip_848_ends_the_stream_with_what_to_do(self, guarded_server: ApacheKafka) -> None:
        stream = KafkaStream(with_password(guarded_server, group_protocol="consumer"), QUIET)
        stream.open(LISTENER)
        until = time.monotonic() + 30

        def poll_on() -> None:
            while time.monotonic() < until:
                stream.poll(1, 0.1)

        with pytest.raises(StreamFatal, match="'classic' works with all"):
            poll_on()
        stream.close()


@pytest.mark.parametrize("servers", ["127.0.0.1:1", "no-such-host.invalid:9092"])
def test_a_broker_that_is_not_there_is_named_with_the_topic_in_time(servers: str) -> None:
    stream = KafkaStream(config(servers, connect_timeout_s=2.0), QUIET)
    before = time.monotonic()
    with pytest.raises(ConfigError) as told:
        stream.open(LISTENER)
    assert time.monotonic() - before < 30.0
    assert "'tickets'" in str(told.value)
    assert servers in str(told.value)
    assert "refused" in str(told.value) or "resolve" in str(told.value)
    stream.close()


def test_a_stream_that_is_not_open_says_so() -> None:
    with pytest.raises(StreamFatal, match="not open"):
        KafkaStream(config(), QUIET).poll(1, 0.0)
