"""What a Kafka message and its place are made of, read with care for what other producers may have written."""

from __future__ import annotations

import operator
from functools import lru_cache

from confluent_kafka import OFFSET_INVALID, TIMESTAMP_NOT_AVAILABLE, Message, TopicPartition

from worker.ports import Headers, Partition

UNREADABLE_HEADERS: Headers = (("ticket-router-unreadable-headers", b"a header name is not UTF-8"),)
"""In the place of a message's headers where one of their names is not UTF-8: confluent-kafka 2.16 cannot show them."""

NO_TIMESTAMP_MS = -1

_read_headers = operator.methodcaller("headers")
"""confluent-kafka 2.16 returns a list and leaves an exception set where a name is not UTF-8. A plain call, once the
interpreter has specialised it, does not look for that, and the exception comes up anywhere later."""


_place = lru_cache(maxsize=1_024)(Partition)
"""One object for all messages of a partition: it is made once, and is found in a dictionary without being compared."""


def headers_of(message: Message) -> Headers:
    try:
        headers: list[tuple[str, bytes | None]] | None = _read_headers(message)
    except (UnicodeDecodeError, SystemError):
        # Asked again, 2.16 answers with a tuple that holds a null pointer: ask once only.
        return UNREADABLE_HEADERS
    return tuple(headers) if headers else ()


def partition_of(message: Message) -> Partition:
    """A message that was consumed has a place; the client's types also cover messages that were never sent."""
    return _place(message.topic(), message.partition())


def at(partition: Partition, offset: int = OFFSET_INVALID, metadata: str | None = None) -> TopicPartition:
    """`metadata` is what a commit says of the offset besides."""
    if metadata is None:
        return TopicPartition(partition.topic, partition.number, offset)
    return TopicPartition(partition.topic, partition.number, offset, metadata)


def partition_at(place: TopicPartition) -> Partition:
    return Partition(place.topic, place.partition)


def metadata_of(place: TopicPartition) -> str | None:
    """What was committed besides the offset, and with it whatever lay behind that in memory.

    confluent-kafka 2.16 reads it up to the next NUL. Its own commits hold one; those of other clients do not, so that
    their metadata may end in anything, or be no UTF-8 at all.
    """
    try:
        return place.metadata
    except UnicodeDecodeError as problem:
        return problem.object.decode("utf-8", errors="replace")
    except Exception:  # noqa: BLE001  # what anybody wrote there must not end a worker
        return None


def offset_of(message: Message) -> int:
    return message.offset()  # type: ignore[return-value]


def timestamp_of(message: Message) -> int:
    """Milliseconds as the producer or the broker stated them, whatever they mean; -1 where there are none."""
    kind, timestamp_ms = message.timestamp()
    return NO_TIMESTAMP_MS if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms
