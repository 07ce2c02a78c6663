"""How far a consumer is behind the end of its partitions: known from its fetches, else asked for, and that seldom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka import OFFSET_END, Consumer, KafkaException

from worker.adapters.kafka_records import at, partition_at
from worker.ports import Partition

ASK_EVERY_S = 10.0
"""How often the ends of partitions are asked for whose end no fetch has moved for so long, because they are paused, the
client holds enough, or nothing came."""

ASK_S = 1.0
"""Such a question may wait so long, while no broker answers."""


@dataclass(slots=True)
class _End:
    """The end of one partition."""

    fetched: int
    """By the last fetch; below zero before the first."""
    since: float
    """When it became that."""
    asked: int = -1
    """By the brokers, since then: without what an open transaction holds back, which a fetch tells of."""


class Lag:
    """Positions come from the client, ends from its last fetch or a question, and starts from who knows what is
    committed."""

    def __init__(self, consumer: Consumer, clock: Callable[[], float]) -> None:
        self._consumer = consumer
        self._clock = clock
        self._starts: dict[Partition, int] = {}
        self._ends: dict[Partition, _End] = {}
        self._ends_asked_at: float | None = None

    def behind(self, partitions: Collection[Partition]) -> Mapping[Partition, int | None]:
        """As TicketStream.lag, for these partitions."""
        fetched = {each: self._consumer.get_watermark_offsets(at(each), cached=True) for each in partitions}
        self._note_ends({partition: end for partition, (_, end) in fetched.items()})
        found: dict[Partition, int | None] = {}
        for partition, (low, _) in fetched.items():
            end = self._end(partition)
            if end < 0:
                found[partition] = None  # nothing was fetched yet
            elif low == end:
                found[partition] = 0
            else:
                position = self._position(partition)
                found[partition] = None if position is None else max(0, end - max(position, low))
        return found

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """What these partitions are read from, until a message was delivered."""
        self._starts.update(offsets)

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._starts.pop(partition, None)
            self._ends.pop(partition, None)

    def _position(self, partition: Partition) -> int | None:
        """Where delivery stands; before the first message, the committed offset that it starts from."""
        position: int = self._consumer.position([at(partition)])[0].offset
        return position if position >= 0 else self._starts.get(partition)

    def _note_ends(self, fetched: Mapping[Partition, int]) -> None:
        """Asks for all at once whose end stands still: one request to each broker that leads some of them."""
        now = self._clock()
        for partition, end in fetched.items():
            known = self._ends.get(partition)
            if known is None or known.fetched != end:
                self._ends[partition] = _End(end, now)
        standing = [partition for partition in fetched if now - self._ends[partition].since >= ASK_EVERY_S]
        if not standing or (self._ends_asked_at is not None and now - self._ends_asked_at < ASK_EVERY_S):
            return
        self._ends_asked_at = now
        try:  # not get_watermark_offsets(cached=False), which asks two questions for each partition, one by one
            ends = self._consumer.offsets_for_times([at(each, OFFSET_END) for each in standing], timeout=ASK_S)
        except KafkaException:
            return
        for told in ends:
            if not told.error and told.offset >= 0:
                self._ends[partition_at(told)].asked = told.offset

    def _end(self, partition: Partition) -> int:
        known = self._ends[partition]
        return max(known.fetched, known.asked)
