"""Which Kafka topics exist, and how those that are missing are created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from worker.adapters.kafka_client import KafkaConfig, error_of, shared_properties
from worker.errors import ConfigError

REPLICATION_OF_BROKER = -1
"""Lets the broker's default.replication.factor decide (Kafka >= 2.4)."""


class _Silent:
    """librdkafka writes to standard error unless it is given a logger; what matters here is raised."""

    def log(self, *_: object) -> None: ...


def describe_topics(config: KafkaConfig, names: Sequence[str], timeout_s: float = 8.0) -> Mapping[str, int]:
    """Number of partitions of each of these topics that exists; creates none.

    Raises ConfigError where no broker answers or a topic may not be looked at.
    """
    reasons: list[str] = []
    consumer = Consumer(
        {
            **shared_properties(config),
            "group.id": config.group_id,  # demanded by the client; the group is never joined
            "allow.auto.create.topics": False,
            "error_cb": lambda error: reasons.append(error.str()),
            "logger": _Silent(),
        }
    )
    found = {}
    try:
        for name in dict.fromkeys(names):
            try:
                topic = consumer.list_topics(name, timeout=timeout_s).topics[name]
            except KafkaException as problem:
                consumer.poll(0)  # fills `reasons`
                reason = reasons[0] if reasons else error_of(problem).str()
                raise ConfigError(
                    f"no broker of {config.bootstrap_servers} answered within {timeout_s:g} s: {reason}"
                ) from problem
            if topic.error is None:
                found[name] = len(topic.partitions)
            elif topic.error.code() not in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise ConfigError(f"topic {name!r} on {config.bootstrap_servers}: {topic.error.str()}")
    finally:
        consumer.close()
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
    Raises ConfigError where a topic can be neither created nor found. Not for the embedded broker, whose topics are
    created by itself.
    """
    reasons: list[str] = []
    properties = shared_properties(config)
    properties.update(error_cb=lambda error: reasons.append(error.str()), logger=_Silent())
    admin = AdminClient(properties)
    wanted = [NewTopic(name, count, replication_factor, config=dict(settings or {})) for name, count in partitions.items()]
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
            raise ConfigError(
                f"topic {name!r} cannot be created on {config.bootstrap_servers}: {error.str()}"
            ) from problem
        except FutureTimeoutError as problem:
            admin.poll(0)  # fills `reasons`
            reason = reasons[0] if reasons else "no answer"
            raise ConfigError(
                f"topic {name!r} cannot be created on {config.bootstrap_servers} within {timeout_s:g} s: {reason}"
            ) from problem
        created.append(name)
    return tuple(created)
