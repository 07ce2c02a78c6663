"""Where a partition's log is not what it was: offsets that come a second time, and messages that were gone unread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from confluent_kafka import Consumer, KafkaException

from worker.adapters.kafka_records import at
from worker.ports import Gap, Partition

MARKERS = 10
"""Offsets that are passed over without asking why: the markers of transactions and what compaction took have some."""

ASK_S = 1.0


class Gaps:
    """Follows the offsets of what is delivered, under one assignment of each partition."""

    def __init__(self) -> None:
        self._expected: dict[Partition, int] = {}
        self._fresh: set[Partition] = set()
        """Partitions whose first gap is still to come: it is looked at however small, since nothing was read before."""

    def begin(self, offsets: Mapping[Partition, int]) -> None:
        """These partitions are read from these committed offsets on."""
        self._expected.update(offsets)
        self._fresh.update(offsets)

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._expected.pop(partition, None)
            self._fresh.discard(partition)

    def expected(self, partition: Partition) -> int | None:
        """The offset that should come next; None where nothing is known."""
        return self._expected.get(partition)

    def before(self, partition: Partition, offset: int, consumer: Consumer) -> Gap | None:
        """What is wrong between the last message and the one at `offset`, which was just read."""
        expected = self._expected.get(partition)
        self._expected[partition] = offset + 1
        if expected is None or expected == offset:
            return None
        if offset < expected:
            return Gap(partition, expected, offset)
        if partition not in self._fresh and offset - expected < MARKERS:
            return None
        self._fresh.discard(partition)
        try:
            first, _ = consumer.get_watermark_offsets(at(partition), timeout=ASK_S)
        except KafkaException:
            return None
        gone_to = min(first, offset)
        return Gap(partition, expected, gone_to) if gone_to > expected else None
