"""Which broker, topics and group the settings and the rule set name."""

from __future__ import annotations

from worker.adapters.kafka import KafkaConfig, KafkaStream
from worker.core.rules import RuleSet
from worker.core.topics import topic_name
from worker.errors import ConfigError
from worker.ports import TicketStream
from worker.settings import Settings
from worker.telemetry import kafka_logger


def kafka_config(settings: Settings, rule_set: RuleSet) -> KafkaConfig:
    """Raises ConfigError where no broker is named, or the input topic is none or would be fed by the worker itself."""
    if settings.kafka_bootstrap_servers is None:
        raise ConfigError("no broker: set ROUTER_KAFKA_BOOTSTRAP_SERVERS, such as localhost:9092")
    input_topic = settings.kafka_input_topic or rule_set.input_topic
    try:
        topic_name(input_topic)
    except ValueError as error:
        raise ConfigError(
            f"ROUTER_KAFKA_INPUT_TOPIC {input_topic[:300]!r}: {error}. A pattern, such as one that begins with '^', "
            "could match the worker's own outputs: run one worker for each topic"
        ) from error
    if input_topic in rule_set.topics_beside_input:
        raise ConfigError(f"topic '{input_topic}' is input and output: every ticket would go round for ever")
    return KafkaConfig(
        bootstrap_servers=settings.kafka_bootstrap_servers,
        input_topic=input_topic,
        group_id=settings.kafka_group_id or f"ticket-router.{rule_set.id}",
        delivery=settings.delivery,
        session_timeout_ms=settings.kafka_session_timeout_ms,
        assignment_strategy=settings.kafka_assignment_strategy,
        group_protocol=settings.kafka_group_protocol,
        group_instance_id=settings.kafka_group_instance_id,
        max_output_bytes=settings.max_output_bytes,
        properties=settings.kafka_properties,
    )


def make_stream(settings: Settings, rule_set: RuleSet) -> TicketStream:
    """Raises ConfigError; connects only when it is opened."""
    return KafkaStream(kafka_config(settings, rule_set), logger=kafka_logger())
