"""The job of plain.py in FastStream, in batches or message by message. Runs in a virtual environment of its own.

In batches FastStream has no headers of a message's own: there the decision is not sent, which makes its job easier.
"""

import argparse
import asyncio
import logging
from collections import defaultdict

import orjson
from faststream import FastStream
from faststream.confluent import KafkaBroker, KafkaResponse
from faststream.confluent.annotations import KafkaMessage as Context
from pydantic import BaseModel


class Ticket(BaseModel):
    id: str
    text: str
    tenant: str | None = None
    channel: str | None = None
    language: str | None = None
    created_at: str | None = None
    metadata: dict = {}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap", "--input", "--output", "--group"):
        parser.add_argument(name, required=True)
    parser.add_argument("--batch", action="store_true")
    given = parser.parse_args()
    broker = KafkaBroker(
        given.bootstrap,
        logger=None,
        acks="all",
        enable_idempotence=True,
        linger_ms=5,
        compression_type="lz4",
        allow_auto_create_topics=False,  # the mock broker would keep it waiting for a minute
    )
    options = {
        "group_id": given.group,
        "auto_offset_reset": "earliest",
        "session_timeout_ms": 6_000,
        "partition_assignment_strategy": ("range",),
    }

    if given.batch:

        @broker.subscriber(given.input, batch=True, max_records=500, polling_interval=0.02, **options)
        async def decide_all(tickets: list[Ticket], message: Context) -> None:
            by_topic = defaultdict(list)
            for ticket, raw in zip(tickets, message.raw_message, strict=True):
                topic = f"{given.output}.{ticket.metadata['queue']}"
                by_topic[topic].append(KafkaResponse(raw.value(), key=raw.key()))
            for topic, responses in by_topic.items():
                await broker.publish_batch(*responses, topic=topic)

    else:

        @broker.subscriber(given.input, **options)
        async def decide(ticket: Ticket, message: Context) -> None:
            category = ticket.metadata["queue"]
            topic = f"{given.output}.{category}"
            decision = {"ticket_id": ticket.id, "action": "route", "category": category, "topic": topic}
            headers = {"decision": orjson.dumps(decision).decode()}
            raw = message.raw_message
            await broker.publish(raw.value(), topic, key=raw.key(), headers=headers, no_confirm=True)

    logging.disable(logging.WARNING)
    asyncio.run(FastStream(broker, logger=None).run())


if __name__ == "__main__":
    main()
