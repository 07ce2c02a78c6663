"""DeadLetterGuard: alone knows how many of the messages may be no tickets before that is the worker's own fault."""

from __future__ import annotations

from collections import Counter, OrderedDict

from worker.core.envelope import attempt_of
from worker.ports import Delivery, Finished, Partition, PartitionSettlement, Settlement

WINDOW = 200
"""The share is that among so many messages judged last."""
LEAST = 100
"""With fewer than these the share says nothing."""
HOLD_S = 2.0
"""After its start a worker holds dead letters back until it has judged `LEAST` messages, for at most so long. On a
topic with a backlog a worker that is restarted again and again then leaves no dead letters at all."""

_Key = tuple[Partition, int, int]


class DeadLetterGuard:
    """Messages are counted when they are judged, in the order in which they came: scoring takes time that dead letters
    do not need, so the first that are finished are no sample.

    Messages that were sent in again do not count: they were dead letters, or with people, before.
    """

    def __init__(self, limit: float) -> None:
        """More than this share of dead letters is too much; 0 and 1 turn the guard off."""
        self._limit = limit
        self._on = 0 < limit < 1
        self._codes: OrderedDict[_Key, str | None] = OrderedDict()
        self._judged = 0
        self._first_at: float | None = None
        self.verdict: str | None = None
        """Why the worker must end; set once."""

    def judged(self, delivery: Delivery, code: str | None, now: float) -> None:
        """A message is a ticket (None) or a dead letter. A second judgement on the same message replaces the first."""
        if not self._counts(delivery):
            return
        key = (delivery.partition, delivery.epoch, delivery.offset)
        if key not in self._codes:
            self._judged += 1
        self._codes[key] = code
        if len(self._codes) > WINDOW:
            self._codes.popitem(last=False)
        if self._first_at is None:
            self._first_at = now
        if self.verdict is None and code is not None:
            self._judge(delivery)

    def without_held(self, settlement: Settlement, dead_letter_topic: str, now: float) -> Settlement:
        """What may be settled of it: nothing once there is a verdict, no dead letters while it is too early for one."""
        if self.verdict is not None:
            return Settlement()
        if self._judged >= LEAST or self._first_at is None or now - self._first_at >= HOLD_S or not self._on:
            return settlement
        shorter = [self._up_to_held(part, dead_letter_topic) for part in settlement.partitions]
        return Settlement(tuple(part for part in shorter if part.finished))

    def _counts(self, delivery: Delivery) -> bool:
        return self._on and attempt_of(delivery.headers) == 0

    def _judge(self, delivery: Delivery) -> None:
        codes = Counter(code for code in self._codes.values() if code is not None)
        dead, seen = codes.total(), len(self._codes)
        if seen < LEAST or dead <= self._limit * seen:
            return
        (most, _), *_ = codes.most_common(1)
        where = f"{delivery.partition.topic}/{delivery.partition.number}/{delivery.offset}"
        self.verdict = (
            f"{dead} of the last {seen} messages would become dead letters (mostly {most}, the last one at {where}), "
            f"and ROUTER_DEAD_LETTER_LIMIT allows a share of {self._limit:g}: ended before settling them. Look at the "
            "intake in rules.yaml and at who writes to the topic; where such messages are meant to be dead letters, "
            "set it to 0"
        )

    def _up_to_held(self, part: PartitionSettlement, dead_letter_topic: str) -> PartitionSettlement:
        for index, finished in enumerate(part.finished):
            if self._counts(finished.delivery) and _is_dead_letter(finished, dead_letter_topic):
                head = part.finished[:index]
                return PartitionSettlement(part.partition, part.epoch, head, finished.delivery.offset)
        return part


def _is_dead_letter(finished: Finished, dead_letter_topic: str) -> bool:
    return any(output.topic == dead_letter_topic for output in finished.outputs)
