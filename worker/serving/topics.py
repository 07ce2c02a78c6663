"""Commands about a rule set's topics: make them, fill them, read them, account for every ticket, send in again."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Literal

from worker import wiring
from worker.adapters.files import rows
from worker.adapters.kafka_client import KafkaConfig
from worker.adapters.kafka_topics import create_topics, describe_topics
from worker.adapters.topic_log import TopicReader, TopicWriter
from worker.errors import ConfigError
from worker.offline.audit import Ledger
from worker.offline.audit import audit as audit_topics
from worker.offline.exporting import Exported, lines_of
from worker.offline.replay import Replay, Resend, Selection
from worker.offline.replay import plan as plan_replay
from worker.offline.sending import as_message
from worker.settings import Settings
from worker.wiring import Desk

CLOCK_SKEW_MS = 3_600_000
"""Outputs may be stamped by another machine's clock than the tickets that they belong to."""
AUDIT_LOOKS, AUDIT_PAUSE_S = 3, 15.0
"""What lies behind a dead worker's open transaction cannot be read until the brokers have ended that: look again."""
WRITE_S = 120.0
"""How long the brokers may take to acknowledge what is sent in again."""


def rule_set_topics(
    settings: Settings, folder: Path, create: bool, partitions: int, replication: int
) -> Mapping[str, int | None]:
    """Every topic of the rule set with its partitions; None is missing. Raises ConfigError."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    names = (config.input_topic, *rule_set.topics_beside_input)
    found = describe_topics(config, names)
    missing = dict.fromkeys((name for name in names if name not in found), partitions)
    if create and missing:
        create_topics(config, missing, replication)
        found = describe_topics(config, names)
    return {name: found.get(name) for name in names}


def export(settings: Settings, folder: Path, to: Path, what: Exported = "decisions") -> int:
    """Every decision of the decisions topic, one JSON line each; or every ticket that went to people, with its text, or
    every answer. How many there were. Raises ConfigError.
    """
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    topics, line_of = lines_of(what, rule_set, settings.max_ticket_bytes)
    reader = TopicReader(config.bootstrap_servers, config.properties)
    count = 0
    target = sys.stdout.buffer if str(to) == "-" else None
    try:
        with target or to.open("wb") as file:  # closing standard output is fine: nothing is written after
            for record in reader.records(topics):
                line = line_of(record)
                if line is not None:
                    file.write(line + b"\n")
                    count += 1
    except OSError as error:
        raise ConfigError(f"{to}: cannot be written: {error.strerror}") from error
    finally:
        reader.close()
    return count


def send(settings: Settings, folder: Path, tickets: Path, limit: int | None) -> tuple[str, int]:
    """Puts the rows of a file on the input topic; its name, and how many. Raises ConfigError, StreamRetriable."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    messages = (as_message(row, number, rule_set, config.input_topic) for number, row in rows(tickets, ("text",)))
    planned = list(islice((message for message in messages if message is not None), limit))
    if describe_topics(config, [config.input_topic]).get(config.input_topic) is None:
        raise ConfigError(f"topic '{config.input_topic}' does not exist; `ticket-router topics --create` makes it")
    writer = TopicWriter(config.bootstrap_servers, config.properties)
    for message in planned:
        writer.write(message)
    writer.flush(WRITE_S)
    return config.input_topic, len(planned)


def audit(settings: Settings, folder: Path, since_ms: int | None) -> Ledger:
    """What became of the tickets that came in since then. Raises ConfigError, StreamRetriable."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    ends = [topic for topic in rule_set.output_topics if topic != rule_set.decisions_topic]
    reader = TopicReader(config.bootstrap_servers, config.properties, config.group_id)
    try:
        for look in range(1, AUDIT_LOOKS + 1):
            begins = reader.begins([config.input_topic, *ends])
            committed = reader.committed(config.input_topic)
            tickets = reader.records([config.input_topic], since_ms=since_ms)
            outputs = reader.records(ends, since_ms=None if since_ms is None else max(0, since_ms - CLOCK_SKEW_MS))
            ledger = audit_topics(
                rule_set, tickets, outputs, committed, begins, lambda: reader.ends([config.input_topic])
            )
            if not ledger.missing or look == AUDIT_LOOKS:
                break
            time.sleep(AUDIT_PAUSE_S)
    finally:
        reader.close()
    return ledger


def replay(
    settings: Settings,
    folder: Path,
    source: Literal["dead-letter", "human"],
    since_ms: int | None,
    selection: Selection,
    *,
    dry_run: bool,
) -> Replay:
    """Sends dead letters or escalated tickets in again. Raises ConfigError, StreamRetriable."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    dead_letters = source == "dead-letter"
    topics = (rule_set.dead_letter_topic,) if dead_letters else rule_set.people_topics
    reader = TopicReader(config.bootstrap_servers, config.properties)
    try:
        sent_in = reader.records(
            [config.input_topic], since_ms=None if since_ms is None else max(0, since_ms - CLOCK_SKEW_MS)
        )
        records = reader.records(topics, since_ms=since_ms)
        partitions = describe_topics(config, [config.input_topic]).get(config.input_topic, 0)
        planned = plan_replay(records, sent_in, config.input_topic, partitions, dead_letters, selection)
    finally:
        reader.close()
    return planned if dry_run else _sent_in_again(planned, config)


def _sent_in_again(planned: Replay, config: KafkaConfig) -> Replay:
    """What was sent of it. Raises StreamRetriable."""
    writer = TopicWriter(config.bootstrap_servers, {**config.properties, "message.max.bytes": config.max_output_bytes})
    unwritable: dict[Resend, str] = {}
    for resend in planned.resends:
        try:
            writer.write(resend.output, resend.partition)
        except ConfigError as error:  # one of them must not keep back the others
            unwritable[resend] = f"{error} (ROUTER_MAX_OUTPUT_BYTES is {config.max_output_bytes})"
    writer.flush(WRITE_S)
    return planned.without(unwritable)
