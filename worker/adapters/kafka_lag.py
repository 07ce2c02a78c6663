"""How far a consumer is behind the end of its partitions, as far as that is known without asking for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from confluent_kafka import Consumer, KafkaException, TopicPartition

from worker.ports import Partition

ASK_EVERY_S = 10.0
"""How often the committed offsets of partitions are asked for in which no message was delivered yet."""

ASK_S = 1.0
"""Such a question may wait so long: the answer is held back while a transaction holds the offsets."""


class Lag:
    """Positions come from the client, ends from its last fetch, and starts from what is committed."""

    def __init__(self, consumer: Consumer, clock: Callable[[], float]) -> None:
        self._consumer = consumer
        self._clock = clock
        self._starts: dict[Partition, int] = {}
        self._asked_at: float | None = None

    def behind(self, partitions: Collection[Partition]) -> Mapping[Partition, int | None]:
        """As TicketStream.lag, for these partitions."""
        found: dict[Partition, int | None] = {}
        startless = []
        for partition in partitions:
            low, end = self._consumer.get_watermark_offsets(at(partition), cached=True)
            if end < 0:
                found[partition] = None  # nothing was fetched yet
            elif low == end:
                found[partition] = 0
            else:
                position = self._position(partition)
                found[partition] = None if position is None else max(0, end - max(position, low))
                if position is None:
                    startless.append(partition)
        if startless:
            self._ask_starts(startless)
        return found

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        self._starts.update(offsets)

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._starts.pop(partition, None)

    def _position(self, partition: Partition) -> int | None:
        """Where delivery stands; before the first message, the committed offset that it starts from."""
        position: int = self._consumer.position([at(partition)])[0].offset
        return position if position >= 0 else self._starts.get(partition)

    def _ask_starts(self, partitions: Iterable[Partition]) -> None:
        """The answers serve the next call."""
        now = self._clock()
        if self._asked_at is not None and now - self._asked_at < ASK_EVERY_S:
            return
        self._asked_at = now
        try:
            for found in self._consumer.committed([at(partition) for partition in partitions], timeout=ASK_S):
                if not found.error:
                    self._starts[Partition(found.topic, found.partition)] = max(found.offset, 0)
        except KafkaException:
            return


def at(partition: Partition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.number)
