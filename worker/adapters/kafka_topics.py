"""Which Kafka topics exist, and how those that are missing are created."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from worker.adapters.kafka_client import KafkaConfig, advice, error_of, shared_properties, unusable
from worker.errors import ConfigError

TELLING = frozenset(
    {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL, KafkaError._RESOLVE}
)
"""Errors that say more than the connection failures that follow from them."""

UNKNOWN_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})

NEW_TOPIC_S = 2.0
"""A topic that was just created may be unknown to a broker for so long."""

NAMED = 20
"""Missing topics that a sentence names."""

_REASONS = 50

MOCK_CLUSTER = "mockCluster"
"""Begins the id of librdkafka's own mock cluster (2.16)."""

REPLICATION_OF_BROKER = -1
"""Lets the broker's default.replication.factor decide (Kafka >= 2.4)."""


def most_telling(errors: Sequence[KafkaError]) -> KafkaError:
    """Of the errors that one failure caused, the one that says most; there must be at least one."""
    vague = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT}
    return max(errors, key=lambda error: (error.code() in TELLING, error.code() not in vague))


class ClientLog(Protocol):
    """What confluent-kafka asks of a logger."""

    def log(self, level: int, message: str, *arguments: object) -> None: ...


class _Silent:
    """librdkafka writes to standard error unless it is given a logger; what matters here is raised."""

    def log(self, level: int, message: str, *arguments: object) -> None: ...


class TopicLookup:
    """Asks the brokers for topics through a client of its own that joins no group; creates no topic.

    A client of its own, because confluent-kafka 2.16 ends the process with a failed assertion when a consumer's
    `list_topics` is called in one of its callbacks and another callback follows. A consumer, because a producer's
    or an admin client's metadata requests create the topics they ask for, where the broker allows it.
    """

    def __init__(
        self, config: KafkaConfig, log: ClientLog | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises KafkaException where the client's properties are wrong."""
        self._clock = clock
        self.cluster_id = ""
        """By the last answer; empty before the first."""
        self._reasons: list[KafkaError] = []
        self._consumer = Consumer(
            {
                **shared_properties(config),
                "group.id": config.group_id,  # demanded by the client
                "allow.auto.create.topics": False,
                "error_cb": self._note,
            },
            logger=log or _Silent(),
        )

    def error(self, topic: str, timeout_s: float) -> KafkaError | None:
        """None for a topic that exists. Raises KafkaException where no broker answers, with the best known reason."""
        return self._metadata(topic, timeout_s).error  # type: ignore[no-any-return]  # untyped in confluent-kafka 2.16

    def partitions(self, topic: str, timeout_s: float) -> int | None:
        """None for a topic that does not exist. Raises KafkaException for any other error."""
        metadata = self._metadata(topic, timeout_s)
        if metadata.error is None:
            return len(metadata.partitions)
        if metadata.error.code() in UNKNOWN_TOPIC:
            return None
        raise KafkaException(metadata.error)

    def require_readable(self, config: KafkaConfig) -> None:
        """Raises ConfigError where the input topic cannot be read, with what to do."""
        topic, servers, timeout_s = config.input_topic, config.bootstrap_servers, config.connect_timeout_s
        give_up_at = self._clock() + NEW_TOPIC_S
        while True:
            try:
                error = self.error(topic, timeout_s)
            except KafkaException as problem:
                raise _unanswered(config, error_of(problem)) from problem
            if error is None:
                return
            if self._clock() >= give_up_at:
                raise ConfigError(
                    f"input topic {topic!r} cannot be read on {servers}: {error.str()}. Create the topic, correct its "
                    "name or permit this client to read it"
                )
            self.wait(0.2)

    def missing(self, topics: Iterable[str], timeout_s: float) -> list[str]:
        """Those of the topics that do not exist; one that may not be looked at is none. Raises KafkaException."""
        asked = [(topic, self.error(topic, timeout_s)) for topic in topics]
        return [topic for topic, error in asked if error is not None and error.code() in UNKNOWN_TOPIC]

    def wait(self, seconds: float) -> None:
        """Serves the client's callbacks meanwhile."""
        self._consumer.poll(seconds)

    def close(self) -> None:
        self._consumer.close()

    def _metadata(self, topic: str, timeout_s: float) -> Any:
        until = self._clock() + timeout_s
        while True:
            try:
                answer = self._consumer.list_topics(topic, timeout=max(until - self._clock(), 0.05))
                self._consumer.poll(0)  # lets old log lines and errors go
                self._reasons.clear()
                self.cluster_id = str(answer.cluster_id or "")
                return answer.topics[topic]
            except KafkaException as problem:
                self._consumer.poll(0.1)  # brings the reasons
                if self._clock() < until:  # a connection that is closed at once does not wait for the timeout
                    continue
                reasons, self._reasons = self._reasons, []
                raise KafkaException(most_telling([*reasons, error_of(problem)])) from None

    def _note(self, error: KafkaError) -> None:
        if len(self._reasons) < _REASONS:
            self._reasons.append(error)


def require_topics(config: KafkaConfig, outputs: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
    """For a worker that starts: its input topic can be read, and none of its `outputs` is missing.

    Brokers that create topics by themselves (auto.create.topics.enable) are asked to create the missing outputs, as
    they would be by the first record. What this client may not look at is left to the first record, too.
    Raises ConfigError.
    """
    servers, timeout_s = config.bootstrap_servers, config.connect_timeout_s
    lookup = _opened(config, clock)
    try:
        missing = lookup.missing(dict.fromkeys((config.input_topic, *outputs)), timeout_s)
        if set(missing) - {config.input_topic}:
            _mention(config, [topic for topic in missing if topic != config.input_topic], timeout_s)
            give_up_at = clock() + NEW_TOPIC_S
            while missing and clock() < give_up_at:
                lookup.wait(0.2)
                missing = lookup.missing(missing, timeout_s)
        if set(missing) - {config.input_topic}:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            names = ", ".join(repr(topic) for topic in missing[:NAMED])
            raise ConfigError(
                f"topics missing on {servers}: {names}{more}. Create them: `ticket-router topics --create --rules "
                "FOLDER`; or correct their names in the rule set"
            )
        lookup.require_readable(config)
    except KafkaException as problem:
        raise _unanswered(config, error_of(problem)) from problem
    finally:
        lookup.close()


def _opened(config: KafkaConfig, clock: Callable[[], float] = time.monotonic) -> TopicLookup:
    """Raises ConfigError."""
    try:
        return TopicLookup(config, clock=clock)
    except KafkaException as problem:
        raise unusable(problem) from problem


def _mention(config: KafkaConfig, topics: Iterable[str], timeout_s: float) -> None:
    """Asks for these topics as a producer does: brokers that create what is asked for create them."""
    properties = shared_properties(config)
    properties.update(logger=_Silent())
    client = AdminClient(properties)
    for topic in topics:
        client.list_topics(topic, timeout=timeout_s)


def _unanswered(config: KafkaConfig, error: KafkaError) -> ConfigError:
    return ConfigError(
        f"input topic {config.input_topic!r}: no broker of {config.bootstrap_servers} answered within "
        f"{config.connect_timeout_s:g} s: {error.str()}. {advice(config, error)}"
    )


def _is_mock_cluster(config: KafkaConfig) -> bool:
    """False also where that cannot be told: whoever asks then finds out why."""
    lookup = _opened(config)
    try:
        lookup.error(config.input_topic, NEW_TOPIC_S)
    except KafkaException:
        return False
    finally:
        lookup.close()
    return lookup.cluster_id.startswith(MOCK_CLUSTER)


def describe_topics(config: KafkaConfig, names: Sequence[str], timeout_s: float = 8.0) -> Mapping[str, int]:
    """Number of partitions of each of these topics that exists; creates none.

    Raises ConfigError where no broker answers or a topic may not be looked at.
    """
    lookup = _opened(config)
    found = {}
    name = ""
    try:
        for name in dict.fromkeys(names):
            count = lookup.partitions(name, timeout_s)
            if count is not None:
                found[name] = count
    except KafkaException as problem:
        told = error_of(problem)
        raise ConfigError(
            f"topic {name!r} on {config.bootstrap_servers}: {told.str()}. {advice(config, told)}"
        ) from problem
    finally:
        lookup.close()
    return found


def create_topics(
    config: KafkaConfig,
    partitions: Mapping[str, int],
    replication_factor: int = REPLICATION_OF_BROKER,
    timeout_s: float = 15.0,
    *,
    settings: Mapping[str, str] | None = None,
) -> Sequence[str]:
    """Creates those of the topics (name to number of partitions) that do not exist; returns their names.

    `settings` are topic settings by Kafka's names, such as retention.ms.
    Raises ConfigError where a topic can be neither created nor found. The embedded broker makes topics as it likes:
    with 4 partitions, when somebody asks for them.
    """
    if _is_mock_cluster(config):
        _mention(config, partitions, timeout_s)
        return tuple(partitions)
    reasons: list[KafkaError] = []
    properties = shared_properties(config)
    properties.update(error_cb=reasons.append, logger=_Silent())
    admin = AdminClient(properties)
    wanted = [
        NewTopic(name, count, replication_factor, config=dict(settings or {})) for name, count in partitions.items()
    ]
    if not wanted:
        return ()
    created = []
    for name, future in admin.create_topics(wanted, request_timeout=timeout_s).items():
        try:
            future.result(timeout=timeout_s + 1.0)
        except KafkaException as problem:
            error = error_of(problem)
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            admin.poll(0)  # fills `reasons`
            error = most_telling([error, *reasons])
            raise ConfigError(
                f"topic {name!r} cannot be created on {config.bootstrap_servers}: {error.str()}. "
                f"{advice(config, error)}"
            ) from problem
        except FutureTimeoutError as problem:
            raise ConfigError(
                f"topic {name!r} cannot be created on {config.bootstrap_servers}: no answer within {timeout_s:g} s"
            ) from problem
        created.append(name)
    return tuple(created)
