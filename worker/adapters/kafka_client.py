"""How a librdkafka client is set up: the properties the guarantees rest on, its log lines, and what its errors mean."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from confluent_kafka import KafkaError, KafkaException

from worker.errors import ConfigError

GUARDED_PROPERTIES = frozenset(
    {
        "acks",
        "request.required.acks",
        "allow.auto.create.topics",
        "auto.offset.reset",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "error_cb",
        "group.id",
        "group.protocol",
        "isolation.level",
        "logger",
        "on_commit",
        "partition.assignment.strategy",
        "transaction.timeout.ms",
        "transactional.id",
    }
)
"""Properties that no setting may override: delivery depends on them."""

REFUSALS = frozenset(
    {
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
    }
)
"""Delivery errors that another attempt at the same record cannot cure."""

SIZE_REFUSALS = frozenset(
    {KafkaError.INVALID_MSG_SIZE, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
)
"""Refusals that a broker gives to a whole batch because of one record in it (librdkafka 2.16 splits none)."""

TOPIC_REFUSALS = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
    }
)
"""Refusals that hold for the topic, whatever the record."""


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """Everything the Kafka adapter needs to know; times end in their unit."""

    bootstrap_servers: str
    input_topic: str
    group_id: str
    client_id: str = "ticket-router"
    delivery: Literal["exactly_once", "at_least_once"] = "at_least_once"
    """`exactly_once` needs a broker with transactions (Apache Kafka >= 2.5), which the embedded one is not."""
    group_protocol: Literal["classic", "consumer"] = "classic"
    """`consumer` is KIP-848: Apache Kafka >= 4.1 (librdkafka needs ConsumerGroupHeartbeat v1)."""
    assignment_strategy: Literal["cooperative-sticky", "range", "roundrobin"] = "cooperative-sticky"
    """Classic protocol only."""
    session_timeout_ms: int = 45_000
    """Classic protocol only; with KIP-848 the broker decides."""
    max_poll_interval_ms: int = 300_000
    """A member that does not poll for so long loses its partitions."""
    group_instance_id: str | None = None
    """Static membership: a restart within the session timeout keeps the partitions."""
    connect_timeout_s: float = 8.0
    """How long `open` waits for the first answer of a broker."""
    settle_timeout_s: float = 10.0
    """How long one `settle` may wait for acknowledgements and for the commit, together."""
    release_timeout_s: float = 5.0
    """The same where partitions are leaving: on revocation and in `close`."""
    request_timeout_ms: int = 10_000
    """socket.timeout.ms of both clients; what a silent broker can hold up."""
    max_output_bytes: int = 1_000_000
    """Largest record that is produced, keys and headers included (message.max.bytes)."""
    properties: Mapping[str, str | int | float | bool] = field(default_factory=dict, repr=False)
    """More client properties for consumer and producer, as for TLS and SASL; none of GUARDED_PROPERTIES."""


class RationedLog:
    """Takes librdkafka's lines to a logger, the same line at most once in `every_s` seconds.

    A client that cannot connect writes twenty lines a second. Lines are the same when they differ in digits only, and
    not in the partition: it stands in brackets, as in `tickets [3]`, and what befell one tells nothing of the next.
    """

    _REMEMBERED = 256
    _DIGITS = re.compile(r"\[\d+\]|\d+")

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], every_s: float = 60.0) -> None:
        self._logger = logger
        self._clock = clock
        self._every_s = every_s
        self._last: dict[str, tuple[float, int]] = {}

    def log(self, level: int, message: str, *arguments: object) -> None:
        """The one method that confluent-kafka calls on what it is given as `logger`."""
        text = message % arguments if arguments else message
        shape = self._DIGITS.sub(lambda digits: "#" if digits[0].isdigit() else digits[0], text)
        now = self._clock()
        written_at, silenced = self._last.get(shape, (None, 0))
        if written_at is not None and now - written_at < self._every_s:
            self._last[shape] = (written_at, silenced + 1)
            return
        if len(self._last) >= self._REMEMBERED:
            self._last.clear()
        self._last[shape] = (now, 0)
        suffix = f" (and {silenced} more like it)" if silenced else ""
        self._logger.log(level, "%s%s", text, suffix)


def shared_properties(config: KafkaConfig) -> dict[str, Any]:
    """What consumer, producer and admin client have in common.

    Raises ConfigError where `config.properties` names a guarded property.
    """
    guarded = sorted(GUARDED_PROPERTIES.intersection(config.properties))
    if guarded:
        raise ConfigError(
            f"Kafka client properties: {', '.join(guarded)} must not be set: delivery depends on the worker's values"
        )
    return {
        "bootstrap.servers": config.bootstrap_servers,
        "client.id": config.client_id,
        "socket.timeout.ms": config.request_timeout_ms,
        "reconnect.backoff.max.ms": 3_000,
        **config.properties,
    }


def consumer_properties(config: KafkaConfig) -> dict[str, Any]:
    """Prefetch stays near 4 MiB and 1,000 records, so that a backlog of large tickets cannot fill memory.

    The limits of a fetch are about what the broker sends, compressed batches, and all of an answer is decompressed at
    once: they are small, because text that repeats itself shrinks to a hundredth. One batch comes whatever its size.
    """
    properties = {
        "fetch.message.max.bytes": 65_536,
        "fetch.max.bytes": 1_000_000,  # the client raises it to message.max.bytes
        "fetch.queue.backoff.ms": 50,  # how soon a partition is fetched again after the queue was full
        "queued.max.messages.kbytes": 4_096,
        "queued.min.messages": 1_000,
        "topic.metadata.refresh.interval.ms": 30_000,  # how late added partitions are seen; librdkafka's own: 5 minutes
        **shared_properties(config),
        "group.id": config.group_id,
        "group.protocol": config.group_protocol,
        "allow.auto.create.topics": False,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "max.poll.interval.ms": config.max_poll_interval_ms,
    }
    if config.group_protocol == "classic":
        properties["session.timeout.ms"] = config.session_timeout_ms
        properties["partition.assignment.strategy"] = config.assignment_strategy
    if config.group_instance_id is not None:
        properties["group.instance.id"] = config.group_instance_id
    return properties


def producer_properties(config: KafkaConfig) -> dict[str, Any]:
    """Batches of half of what a broker takes by default (message.max.bytes), because it refuses a batch as a whole: so
    large they cost half of what those of 128 KiB do. Java's partitioner, so that a key keeps its partition whoever
    produces it."""
    return {
        "linger.ms": 5,
        "compression.type": "lz4",
        "partitioner": "murmur2_random",
        **shared_properties(config),
        "acks": "all",
        "enable.idempotence": True,
        "batch.size": 524_288,
        "message.max.bytes": config.max_output_bytes,
        "message.timeout.ms": max(1_000, int(config.settle_timeout_s * 1_000)),
    }


class BrokerTrouble:
    """What is wrong with the brokers: stated once it has lasted `after_s` seconds, until it is known to be over."""

    _DOWN = frozenset({KafkaError._ALL_BROKERS_DOWN})
    _CREDENTIALS = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED})
    _DETAILS = frozenset({KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._TIMED_OUT})
    _PERMISSIONS = frozenset(
        {
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
        }
    )
    _TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
    _STRANGER: ClassVar[Mapping[int, str]] = {
        KafkaError.INCONSISTENT_GROUP_PROTOCOL: "its members have another ROUTER_KAFKA_ASSIGNMENT_STRATEGY or "
        "ROUTER_KAFKA_GROUP_PROTOCOL, or are no workers (ROUTER_KAFKA_GROUP_ID)",
        KafkaError.GROUP_MAX_SIZE_REACHED: "it has as many members as the brokers allow (group.max.size)",
        KafkaError.INVALID_SESSION_TIMEOUT: "ROUTER_KAFKA_SESSION_TIMEOUT_MS is outside what the brokers allow",
    }
    """Told once, while the client goes on trying to join; over when it is given partitions."""

    def __init__(self, config: KafkaConfig, clock: Callable[[], float], after_s: float = 3.0) -> None:
        self._config = config
        self._clock = clock
        self._after_s = after_s
        self._since: float | None = None
        self._unreachable = False
        self._forbidden = False
        self._sentence = ""
        self._detail = ""
        self._credentials = ""

    def report(self, error: KafkaError) -> None:
        """For error callbacks and for errors that arrive in the place of messages."""
        code, text = error.code(), error.str()
        if code in self._CREDENTIALS:
            self._credentials = text
            self._unreachable = True
            self._suspect(f"the brokers do not let this client in: {text}")
        elif code in self._DOWN:
            self._unreachable = True
            reason = self._credentials or self._detail or text
            self._suspect(f"no broker of {self._config.bootstrap_servers} answers: {reason}")
        elif code in self._DETAILS:
            self._detail = text
        elif code in self._PERMISSIONS:
            self._forbidden = True
            self._suspect(f"the brokers forbid what the worker needs: {text}")
        elif code in self._STRANGER:
            self._forbidden = True
            self._suspect(f"group {self._config.group_id!r} does not take this worker: {self._STRANGER[code]}: {text}")
        elif code in self._TOPIC:
            self._suspect(f"input topic {self._config.input_topic!r} is gone: {text}")

    def answered(self) -> None:
        """A broker answered and knows the input topic: all is well, but for what it forbids or refuses this client."""
        if not self._forbidden:
            self.working()

    def working(self) -> None:
        """Partitions or messages came: all is well."""
        self._since = None
        self._unreachable = self._forbidden = False
        self._sentence = self._detail = self._credentials = ""

    @property
    def suspected(self) -> bool:
        return self._since is not None

    @property
    def unreachable(self) -> bool:
        """No broker can be talked to, by the last that was heard."""
        return self._unreachable

    @property
    def reason(self) -> str:
        """The best known reason why nothing can be reached, or an empty string."""
        return self._credentials or self._detail or self._sentence

    def sentence(self) -> str | None:
        if self._since is None or self._clock() - self._since < self._after_s:
            return None
        return self._sentence

    def _suspect(self, sentence: str) -> None:
        self._sentence = sentence
        if self._since is None:
            self._since = self._clock()


_LOGIN = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
_RIGHTS = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)


def advice(config: KafkaConfig, error: KafkaError) -> str:
    """What to look at where brokers do not serve this client, by the error that says most; a sentence."""
    return advice_for(config.properties, error)


def advice_for(properties: Mapping[str, object], error: KafkaError) -> str:
    """The same for a client with these properties."""
    code = error.code()
    if code in _LOGIN:
        return "Check sasl.mechanism, sasl.username and sasl.password in ROUTER_KAFKA_PROPERTIES"
    if code == KafkaError._SSL:
        return (
            "Check security.protocol and ssl.ca.location in ROUTER_KAFKA_PROPERTIES, and that the brokers' certificate "
            "names the address"
        )
    if code in _RIGHTS:
        return "Give this client the rights that docs/deploying.md lists (Security)"
    # The client does not say why it was disconnected (librdkafka 2.16), and a listener of another protocol hangs up.
    protocol = str(properties.get("security.protocol", "PLAINTEXT")).upper()
    return (
        "Check the bootstrap servers, that the brokers run, and security.protocol in ROUTER_KAFKA_PROPERTIES: it is "
        f"{protocol}, and a broker that wants TLS or a login hangs up on a client that brings neither"
    )


def unusable(problem: KafkaException) -> ConfigError:
    """For a client that was not even made: librdkafka 2.16 names the property in its words, and the file nowhere."""
    text = error_of(problem).str()
    named = "ROUTER_KAFKA_PROPERTIES names a file that cannot be used: " if ".location failed" in text else ""
    return ConfigError(f"Kafka client settings: {named}{text}")


def error_of(problem: KafkaException) -> KafkaError:
    """The KafkaError inside a KafkaException (confluent-kafka carries it as the first argument)."""
    error = problem.args[0]
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL, str(error))
