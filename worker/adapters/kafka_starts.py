"""Where the partitions that a consumer is given begin: what is committed, asked for here and not left to librdkafka."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

from worker.adapters.kafka_client import RationedLog, error_of
from worker.adapters.kafka_records import at, partition_at
from worker.adapters.kafka_topic_identity import Identity, TopicIdentity
from worker.ports import Gap, Partition

AT_ONCE_S = 1.0
"""An assignment waits so long for the answer, which else takes milliseconds."""

ASK_AGAIN_S = 0.2
ASK_EVERY_S = 1.0
"""Later the answer is asked for so long and so often: the other partitions are read and settled between."""


class Starts:
    """Partitions whose start is unknown are assigned at a place that stands for it, and wait in `waiting`.

    Left to itself, librdkafka 2.16 takes a committed offset that an open transaction holds back for none where the
    assignment changes meanwhile, and begins at the beginning. A dead worker's transaction ends with its timeout, and
    when the coordinator looks for such (every 10 s by default).

    An offset that counts in an earlier topic of the same name, by what was noted with it, is none of this one's: that
    partition is read from its beginning."""

    def __init__(self, identity: TopicIdentity, clock: Callable[[], float], log: RationedLog) -> None:
        self._identity = identity
        self._clock = clock
        self._log = log
        self._waiting: set[Partition] = set()
        self._found: dict[Partition, int | None] = {}
        self._replaced: list[Gap] = []
        self._asked_at = 0.0
        self._why = ""

    @property
    def waiting(self) -> Set[Partition]:
        """Not to be read from yet."""
        return self._waiting

    def trouble(self) -> str | None:
        return f"where to begin is not known yet: {self._why}" if self._waiting else None

    def of(self, consumer: Consumer, assigned: Sequence[TopicPartition]) -> list[TopicPartition]:
        """The same partitions, each with an offset."""
        known = self._ask(consumer, assigned, AT_ONCE_S) if assigned else []
        if known is None:
            self._log.log(logging.WARNING, "partitions are assigned, but not read yet: %s", self._why)
            self._waiting.update(map(partition_at, assigned))
            return [at(partition, OFFSET_BEGINNING) for partition in map(partition_at, assigned)]
        return known

    def serve(self, consumer: Consumer) -> bool:
        """Asks again when it is time; True where partitions wait no longer."""
        if not self._waiting or self._clock() - self._asked_at < ASK_EVERY_S:
            return False
        waiting = [at(partition) for partition in self._waiting]
        for start in self._ask(consumer, waiting, ASK_AGAIN_S) or ():
            try:
                consumer.seek(start)
            except KafkaException as problem:
                self._why = error_of(problem).str()
            else:
                self._waiting.discard(partition_at(start))
        return len(self._waiting) < len(waiting)

    def begun(self) -> Mapping[Partition, int | None]:
        """Partitions whose start was found since the last call, with the committed offset, None where there is none."""
        found, self._found = self._found, {}
        return found

    def replaced(self) -> Sequence[Gap]:
        """Those of them, since the last call, whose committed offset is one of an earlier topic."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def forget(self, partitions: Iterable[Partition]) -> None:
        self._waiting.difference_update(partitions)

    def _ask(
        self, consumer: Consumer, partitions: Sequence[TopicPartition], timeout_s: float
    ) -> list[TopicPartition] | None:
        """None where one of them is not known."""
        try:
            found = consumer.committed(list(partitions), timeout=timeout_s)
            earlier = self._of_earlier_topics(found, timeout_s)
        except KafkaException as problem:
            self._why = error_of(problem).str()
            return None
        finally:
            self._asked_at = self._clock()
        for each in found:
            if each.error:
                self._why = f"{each.topic} [{each.partition}]: {each.error.str()}"
                return None
        none = [each for each in found if each.offset < 0]
        if none:
            # A new group; or one whose offsets were deleted, or expired while nobody was in it.
            self._log.log(
                logging.WARNING,
                "no committed offset, so these are read from the beginning: %s",
                ", ".join(f"{each.topic} [{each.partition}]" for each in none),
            )
        offsets = {partition_at(each): each.offset if each.offset >= 0 else None for each in found}
        self._replaced += [Gap(partition, offsets[partition] or 0, 0) for partition in earlier]
        offsets.update(dict.fromkeys(earlier, 0))
        self._found |= offsets
        return [at(each, OFFSET_BEGINNING if offset is None else offset) for each, offset in offsets.items()]

    def _of_earlier_topics(self, committed: Sequence[TopicPartition], timeout_s: float) -> list[Partition]:
        """Those that have to begin anew. Raises KafkaException where it has to be asked for and no answer comes."""
        noted = {partition_at(each): Identity.noted_with(each) for each in committed if each.offset > 0}
        known = self._identity.present
        if all(note is None or note == known for note in noted.values()):
            return []
        # This worker's own knowledge may be the older one: another member saw the new topic first.
        present = self._identity.ask(timeout_s)
        return [partition for partition, note in noted.items() if present is not None and present.has_replaced(note)]
