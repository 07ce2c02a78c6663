"""How many bytes may wait for one flush where a topic refused a batch that may only have been too large together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker.adapters.kafka_refusals import REFUSED_RECORD_RETRY_S, record_bytes
from worker.ports import Output


@dataclass(slots=True)
class _Tight:
    until: float
    taken: int = 0
    """The most bytes that one flush has delivered to the topic."""
    room: int = 0
    """So many bytes may wait for one flush; a record by itself may always."""
    grows: bool = True


@dataclass(slots=True)
class _Waiting:
    records: int = 0
    size: int = 0


class TightTopics:
    """Topics that refused a batch, for a while after the last time they did.

    A broker judges a batch as a whole, so of such a topic the first record is sent alone, and then as many at a time as
    turn out to be taken. Who was alone and is refused is to blame.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tight: dict[str, _Tight] = {}
        self._waiting: dict[str, _Waiting] = {}

    @property
    def waiting(self) -> frozenset[str]:
        """Topics of the outputs that were sent and not flushed."""
        return frozenset(self._waiting)

    def begin(self) -> None:
        """Nothing waits to be flushed."""
        self._waiting.clear()
        now = self._clock()
        for topic in [topic for topic, tight in self._tight.items() if tight.until <= now]:
            del self._tight[topic]

    def no_room(self, output: Output) -> bool:
        """Whether what waits has to be flushed before this output is sent."""
        if output.topic not in self._tight:
            return False
        waiting = self._waiting.get(output.topic)
        return waiting is not None and waiting.size + record_bytes(output) > self._tight[output.topic].room

    def sent(self, output: Output) -> None:
        waiting = self._waiting.get(output.topic)
        if waiting is None:
            waiting = self._waiting[output.topic] = _Waiting()
        waiting.records += 1
        if output.topic in self._tight:
            waiting.size += record_bytes(output)

    def flushed(self) -> None:
        """Everything that waited was taken."""
        for topic, tight in self._tight.items():
            waiting = self._waiting.get(topic)
            if waiting is not None:
                tight.taken = max(tight.taken, waiting.size)
                if tight.grows:
                    tight.room = max(tight.room, 2 * waiting.size)
        self._waiting.clear()

    def refused(self, topic: str) -> bool:
        """A record for this topic was refused just now. True where it was sent alone; else less is sent at a time."""
        now = self._clock()
        waiting = self._waiting.get(topic, _Waiting())
        tight = self._tight.setdefault(topic, _Tight(now))
        tight.until = now + REFUSED_RECORD_RETRY_S
        if waiting.records == 1:
            return True
        if not tight.grows:  # what was taken once is not taken any more
            tight.taken = 0
        tight.room = tight.taken
        tight.grows = tight.taken == 0
        return False
