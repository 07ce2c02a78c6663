"""The yardstick: what somebody writes by hand with confluent-kafka. Consume, parse, decide, produce, commit; no more.

It checks the ticket with pydantic, takes the category from a field, and sends the ticket on with a decision in a
header. With --same-job it says as much about a decision as the worker does, and writes that to a topic of decisions
too. It writes no log, counts nothing, keeps no order between what is late and what is not, and stops at any error.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from confluent_kafka import Consumer, KafkaError, Message, Producer
from pydantic import BaseModel, TypeAdapter

AT_ONCE = 500
COMMIT_EVERY_S = 0.2

Decide = Callable[[Message, "Ticket", str, str], bytes]


class Ticket(BaseModel):
    id: str
    text: str
    tenant: str | None = None
    channel: str | None = None
    language: str | None = None
    created_at: str | None = None
    metadata: dict[str, Any] = {}


class Origin(BaseModel):
    topic: str
    partition: int
    offset: int


class Reason(BaseModel):
    code: str
    sentence: str


class Decision(BaseModel):
    """The fields of the worker's envelope that have a value for a ticket without scores."""

    decision_id: str
    ticket_id: str
    tenant: str | None
    origin: Origin
    decided_at: datetime
    action: Literal["route", "escalate"]
    category: str
    topic: str
    reasons: list[Reason]
    rule_set: str
    total_ms: float


def short_decision(_message: Message, ticket: Ticket, category: str, topic: str) -> bytes:
    return orjson.dumps({"ticket_id": ticket.id, "action": "route", "category": category, "topic": topic})


def full_decision(message: Message, ticket: Ticket, category: str, topic: str) -> bytes:
    began = time.monotonic()
    origin = Origin(topic=message.topic() or "", partition=message.partition() or 0, offset=message.offset() or 0)
    identity = f"{origin.topic}/{origin.partition}/{origin.offset}/bench/1"
    return (
        Decision(
            decision_id=hashlib.sha256(identity.encode()).hexdigest()[:32],
            ticket_id=ticket.id,
            tenant=ticket.tenant,
            origin=origin,
            decided_at=datetime.now(UTC),
            action="route",
            category=category,
            topic=topic,
            reasons=[Reason(code="override", sentence=f"Rule 'queue {category}' routes this ticket without a score.")],
            rule_set="bench/1",
            total_ms=(time.monotonic() - began) * 1e3,
        )
        .model_dump_json()
        .encode()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True, help="topics are OUTPUT.CATEGORY, and OUTPUT.decisions")
    parser.add_argument("--group", required=True)
    parser.add_argument("--same-job", action="store_true", help="the worker's two messages, with its fields")
    parser.add_argument("--transactions", action="store_true")
    given = parser.parse_args()
    client = {"bootstrap.servers": given.bootstrap}
    consumer = Consumer(
        {
            **client,
            "group.id": given.group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6_000,
        }
    )
    settings = {**client, "acks": "all", "enable.idempotence": True, "linger.ms": 5, "compression.type": "lz4"}
    if given.transactions:
        settings["transactional.id"] = given.group
    producer = Producer(settings)
    if given.transactions:
        producer.init_transactions(30)
    decided: Decide = full_decision if given.same_job else short_decision
    decisions_topic = f"{given.output}.decisions"
    ticket_of = TypeAdapter(Ticket).validate_json
    consumer.subscribe([given.input])

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            raise SystemExit(str(error))

    def handle(message: Message) -> None:
        value, key = message.value(), message.key()
        ticket = ticket_of(value or b"")
        category = ticket.metadata["queue"]
        topic = f"{given.output}.{category}"
        decision = decided(message, ticket, category, topic)
        producer.produce(topic, value, key, headers=[("decision", decision)], on_delivery=delivered)
        if given.same_job:
            producer.produce(decisions_topic, decision, key, on_delivery=delivered)

    commit_at = time.monotonic() + COMMIT_EVERY_S
    dirty = False
    while True:
        messages = consumer.consume(AT_ONCE, 0.02)
        if messages and given.transactions and not dirty:
            producer.begin_transaction()
        for message in messages:
            if message.error() is not None:
                raise SystemExit(str(message.error()))
            handle(message)
        dirty = dirty or bool(messages)
        producer.poll(0)
        if dirty and time.monotonic() >= commit_at:
            producer.flush(30)
            positions = [at for at in consumer.position(consumer.assignment()) if at.offset >= 0]
            if given.transactions:
                producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 30)
                producer.commit_transaction(30)
            else:
                consumer.commit(offsets=positions, asynchronous=False)
            dirty = False
            commit_at = time.monotonic() + COMMIT_EVERY_S


if __name__ == "__main__":
    main()
