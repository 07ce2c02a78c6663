"""The job of plain.py in Quix Streams. Runs in a virtual environment of its own: nothing of the project is imported."""

import argparse

import orjson
from pydantic import BaseModel, TypeAdapter
from quixstreams import Application
from quixstreams.models.topics import TopicConfig, TopicManager

CATEGORIES = ("billing", "login", "bug", "shipping", "refund", "account", "hardware", "feedback")

PARTITIONS = 24


class Ticket(BaseModel):
    id: str
    text: str
    tenant: str | None = None
    channel: str | None = None
    language: str | None = None
    created_at: str | None = None
    metadata: dict = {}


class NoQuestions(TopicManager):
    """Takes topics as they are: librdkafka's mock broker cannot describe them."""

    def _get_or_create_broker_topic(self, topic):
        topic.broker_config = TopicConfig(num_partitions=PARTITIONS, replication_factor=1)
        return topic


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap", "--input", "--output", "--group"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    application = Application(
        broker_address=given.bootstrap,
        consumer_group=given.group,
        auto_offset_reset="earliest",
        auto_create_topics=False,
        commit_interval=0.2,
        consumer_extra_config={"session.timeout.ms": 6_000, "partition.assignment.strategy": "range"},
        producer_extra_config={"linger.ms": 5, "compression.type": "lz4"},
        loglevel="WARNING",
    )
    application._topic_manager.__class__ = NoQuestions
    ticket_of = TypeAdapter(Ticket).validate_json
    topics = {
        category: application.topic(f"{given.output}.{category}", value_serializer="bytes", key_serializer="bytes")
        for category in CATEGORIES
    }
    chosen = topics["billing"]

    def decide(value, key, timestamp, headers):
        nonlocal chosen
        ticket = ticket_of(value)
        category = ticket.metadata["queue"]
        chosen = topics[category]
        decision = {"ticket_id": ticket.id, "action": "route", "category": category, "topic": chosen.name}
        return [("decision", orjson.dumps(decision))]

    frame = application.dataframe(application.topic(given.input, value_deserializer="bytes", key_deserializer="bytes"))
    frame = frame.set_headers(decide)
    frame.to_topic(lambda value, key, timestamp, headers: chosen)  # rows go through one by one
    application.run()


if __name__ == "__main__":
    main()
