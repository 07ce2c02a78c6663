"""How many bytes may wait for one flush where a topic refused a batch that may only have been too large together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker.adapters.kafka_refusals import REFUSED_RECORD_RETRY_S, record_bytes
from worker.ports import Output


@dataclass(slots=True)
class _Tight:
    until: float
    waiting: int = 0
    """Bytes that were sent and not flushed."""
    taken: int = 0
    """The most bytes that one flush has delivered to the topic."""
    room: int = 0
    """So many bytes may wait for one flush; a record by itself may always."""
    grows: bool = True
    """Until it refuses for the second time; from then on there is less and less room, until nothing is refused."""


class TightTopics:
    """Topics that refused a batch, for a while after the last time they did.

    A broker judges a batch as a whole, so of such a topic the first record is sent alone, and then as many at a time as
    turn out to be taken. Who was alone and is refused is to blame. Nearly always there is no such topic, and then next
    to nothing is done for an output.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tight: dict[str, _Tight] = {}
        self._waiting: list[Output] = []

    @property
    def any(self) -> bool:
        """Whether there is one. Sending and flushing make none."""
        return bool(self._tight)

    @property
    def waiting(self) -> frozenset[str]:
        """Topics of the outputs that were sent and not flushed."""
        return frozenset(output.topic for output in self._waiting)

    def begin(self) -> None:
        """Nothing waits to be flushed."""
        now = self._clock()
        for topic in [topic for topic, tight in self._tight.items() if tight.until <= now]:
            del self._tight[topic]
        self._forget_waiting()

    def no_room(self, output: Output) -> bool:
        """Whether what waits has to be flushed before this output is sent."""
        if output.topic not in self._tight:
            return False
        tight = self._tight[output.topic]
        return tight.waiting > 0 and tight.waiting + record_bytes(output) > tight.room

    def sent(self, output: Output) -> None:
        self._waiting.append(output)
        if output.topic in self._tight:
            self._tight[output.topic].waiting += record_bytes(output)

    def flushed(self) -> None:
        """Everything that waited was taken."""
        for tight in self._tight.values():
            tight.taken = max(tight.taken, tight.waiting)
            if tight.grows:
                tight.room = max(tight.room, 2 * tight.waiting)
        self._forget_waiting()

    def refused(self, topic: str) -> bool:
        """A record for this topic was refused just now. True where it was sent alone; else less is sent at a time."""
        now = self._clock()
        tight = self._tight.setdefault(topic, _Tight(now))
        tight.until = now + REFUSED_RECORD_RETRY_S
        if sum(output.topic == topic for output in self._waiting) == 1:
            return True
        if tight.taken and tight.grows:
            tight.room, tight.grows = tight.taken, False
        else:
            # As many bytes were taken once, but of what compresses better, or of several partitions. Whatever was taken
            # meanwhile says nothing of these: to begin anew would end here again, each time.
            tight.room = min(tight.room, tight.waiting) // 2
        return False

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        for tight in self._tight.values():
            tight.waiting = 0
