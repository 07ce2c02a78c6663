"""The audit: did every ticket that came in end in exactly one place, once, and in order?"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import orjson

from worker.adapters.topic_log import Record
from worker.core.envelope import (
    DECISION_HEADER,
    POINTER,
    Headers,
    Origin,
    attempt_of,
    decided_origin,
    stated_origin,
)
from worker.core.rules import RuleSet
from worker.ports import Partition
from worker.runtime.outputs import origin_in

End = Literal["routed", "escalated", "dead_lettered"]

CLOCKS_MS = 60_000
"""Workers settle a partition in order, and their clocks may differ by so much."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What became of the tickets of one input topic."""

    tickets: int
    """Messages of the input topic in the window; one that was sent in again counts where it first came in."""
    ends: Mapping[End, int]
    """How often a ticket of the window ended so."""
    waiting: int
    """Not committed by the group yet, and nowhere seen."""
    missing: tuple[Origin, ...]
    """Committed, and in no output topic."""
    duplicates: tuple[Origin, ...]
    """In the output topics more often than in the input topic; one entry for each copy too many."""
    out_of_order: tuple[Origin, ...]
    """Behind a later ticket with the same key, in the same output topic."""
    foreign: int
    """Messages of output topics that state no origin: others write there too."""
    earlier: int = 0
    """Outputs of tickets of an earlier topic of the same name (or of an end that the log lost), whose offsets are now
    other tickets' or nobody's."""
    expired: Mapping[Partition, int] = field(default_factory=dict)
    """Tickets that the brokers deleted before anything was decided about them, at the least; only where there are."""

    @property
    def clean(self) -> bool:
        return not (self.missing or self.duplicates or self.out_of_order or self.expired)


@dataclass(slots=True)
class _Seen:
    """One origin: how often it came in, and where it ended."""

    content: int | None
    """A hash of key and value, which an output keeps as they came; None where tickets of several contents state this
    origin."""
    came_at_ms: int
    came_in: int = 0
    committed: bool = False
    ends: Counter[End] = field(default_factory=Counter)


def audit(
    rule_set: RuleSet,
    tickets: Iterable[Record],
    outputs: Iterable[Record],
    committed: Mapping[Partition, int],
    begins: Mapping[Partition, int] | None = None,
    ends_now: Callable[[], Mapping[Partition, int]] | None = None,
) -> Ledger:
    """Compares the topics, read with isolation.level=read_committed, the outputs after the tickets.

    `committed` are the group's offsets, asked before anything was read, and `begins` the first offsets of all topics,
    asked before that. `ends_now` asks for the ends of the input topic; it is called when all is read. Origins that the
    tickets do not hold (older, newer, or of another input topic) are left out.
    """
    seen: dict[Origin, _Seen] = {}
    first: dict[Partition, int] = {}
    count = 0
    gone = _Gone(committed, begins or {})
    for record in tickets:
        gone.came(record)
        origin = origin_in(record.headers, record.partition, record.offset)
        if origin.offset < first.setdefault(record.partition, record.offset):
            continue
        count += 1
        entry = seen.setdefault(origin, _Seen(_content(record), record.timestamp_ms))
        if entry.content != _content(record):
            entry.content = None
        entry.came_in += 1
        entry.committed = record.offset < committed.get(record.partition, 0)
    order = _Order()
    foreign = 0
    earlier = _Earlier()
    for record in outputs:
        stated = _origin_of_output(record.headers)
        gone.output(record, stated)
        if stated is None:
            foreign += 1
            continue
        found = seen.get(stated)
        if found is None:
            earlier.elsewhere(stated)
            continue
        end = _end(rule_set, record.partition.topic)
        older = 0 <= record.timestamp_ms < found.came_at_ms
        if not _same(record, found):
            earlier.other_content(stated, older)
            continue
        if older:
            earlier.older(found, end)
        found.ends[end] += 1
        if found.came_in == 1:  # what was sent in again has its place by when that was
            order.note(record, stated)
    of_earlier = earlier.count({} if ends_now is None else ends_now())
    ends: Counter[End] = Counter()
    missing, duplicates, waiting = [], [*earlier.copies], 0
    for origin, entry in seen.items():
        ends.update(entry.ends)
        surplus = entry.ends.total() - entry.came_in
        if surplus > 0:
            duplicates += [origin] * surplus
        elif entry.committed:
            missing += [origin] * -surplus
        else:
            waiting -= surplus
    return Ledger(
        tickets=count,
        ends=dict(ends),
        waiting=waiting,
        missing=tuple(missing),
        duplicates=tuple(duplicates),
        out_of_order=tuple(order.violations),
        foreign=foreign,
        earlier=of_earlier,
        expired=gone.expired(),
    )


def _content(record: Record) -> int:
    return hash((record.key, record.value))


def _same(output: Record, ticket: _Seen) -> bool:
    """Whether the output can be of this ticket, by what is in it; a dead letter that only points holds nothing."""
    if ticket.content is None or any(name == POINTER for name, _ in output.headers):
        return True
    return ticket.content == _content(output)


class _Earlier:
    """Outputs whose ticket is not the one that now lies where they say: the topic was deleted and made anew.

    What is certain is what holds something else than that ticket and is older, or lies behind the topic's end. Only
    then are the others judged by their time: alone it would take a wrong clock for a new topic.
    """

    def __init__(self) -> None:
        self.copies: list[Origin] = []
        """Others that hold something else, and are no older: somebody's own."""
        self._certain = 0
        self._elsewhere: Counter[Origin] = Counter()
        self._older: list[tuple[_Seen, End]] = []

    def other_content(self, origin: Origin, older: bool) -> None:
        if older:
            self._certain += 1
        else:
            self.copies.append(origin)

    def elsewhere(self, origin: Origin) -> None:
        self._elsewhere[origin] += 1

    def older(self, ticket: _Seen, end: End) -> None:
        self._older.append((ticket, end))

    def count(self, ends: Mapping[Partition, int]) -> int:
        """Takes them out of the tickets' ends; how many they are."""
        topics = {partition.topic for partition in ends}
        for origin, outputs in self._elsewhere.items():
            if origin.topic in topics and origin.offset >= ends.get(Partition(origin.topic, origin.partition), 0):
                self._certain += outputs
        if not self._certain:
            return 0
        for ticket, end in self._older:
            ticket.ends[end] -= 1
        return self._certain + len(self._older)


class _Gone:
    """Tickets that the brokers deleted (retention, delete-records) before a worker came to them.

    Certain below the log's start are those behind the committed offset. Once workers went on behind the gap, it shows
    in the offsets that were decided: where outputs of both sides are there still, no output topic lost any of that
    time, and no transaction leaves offsets without a ticket. Tickets that were sent in again are decided under
    another offset than their own, so that many are taken off.
    """

    def __init__(self, committed: Mapping[Partition, int], begins: Mapping[Partition, int]) -> None:
        self._committed = committed
        self._begins = begins
        self._next: dict[Partition, int] = {}
        self._whole: dict[Partition, bool] = {}
        self._decided: defaultdict[Partition, dict[int, int]] = defaultdict(dict)
        self._sent_again: Counter[Partition] = Counter()
        self._first: dict[Partition, tuple[int, int]] = {}
        """Of each partition of the outputs: offset and time of its first record."""

    def came(self, record: Record) -> None:
        following = self._next.get(record.partition, record.offset)
        self._whole[record.partition] = self._whole.get(record.partition, True) and following == record.offset
        self._next[record.partition] = record.offset + 1

    def output(self, record: Record, origin: Origin | None) -> None:
        self._first.setdefault(record.partition, (record.offset, record.timestamp_ms))
        if origin is None:
            return
        place = Partition(origin.topic, origin.partition)
        if origin.offset < self._begins.get(place, 0):
            self._decided[place][origin.offset] = record.timestamp_ms
            decided = any(name == DECISION_HEADER for name, _ in record.headers)
            self._sent_again[place] += attempt_of(record.headers) > (0 if decided else 1)

    def expired(self) -> dict[Partition, int]:
        found: dict[Partition, int] = {}
        for partition, next_offset in self._committed.items():
            begin = self._begins.get(partition, 0)
            decided = sum(next_offset <= offset < begin for offset in self._decided[partition])
            unread = max(0, begin - next_offset - decided)
            number = unread + self._passed_over(partition, min(begin, next_offset))
            if number:
                found[partition] = number
        return found

    def _passed_over(self, partition: Partition, below: int) -> int:
        """Offsets before `below` that no output states, though outputs of that time and later are there."""
        decided = self._decided.get(partition)
        if not decided or not self._whole.get(partition, False):
            return 0
        from_ms = self._complete_from_ms()
        surely = [offset for offset, at_ms in decided.items() if at_ms >= from_ms and offset < below]
        if not surely:
            return 0
        first = min(surely)
        known = sum(first <= offset < below for offset in decided)
        return max(0, below - first - known - self._sent_again[partition])

    def _complete_from_ms(self) -> float:
        """Since when no output topic lost a record to its own retention."""
        from_ms = -math.inf
        inputs = {partition.topic for partition in self._committed}
        for partition in self._begins.keys() | self._first.keys():
            first = self._first.get(partition)
            if first is None:
                lost_all = self._begins[partition] > 0 and partition.topic not in inputs
                from_ms = math.inf if lost_all else from_ms
            elif first[0] > 0:
                from_ms = max(from_ms, first[1] + CLOCKS_MS)
        return from_ms


class _Order:
    """First copies only: a duplicate is counted as one, and steps back by its nature."""

    def __init__(self) -> None:
        self._last: dict[tuple[Partition, bytes, int], int] = {}
        self._met: defaultdict[str, set[Origin]] = defaultdict(set)
        self.violations: list[Origin] = []

    def note(self, record: Record, origin: Origin) -> None:
        if record.key is None or origin in self._met[record.partition.topic]:
            return
        self._met[record.partition.topic].add(origin)
        lane = (record.partition, record.key, origin.partition)
        if origin.offset < self._last.get(lane, -1):
            self.violations.append(origin)
        else:
            self._last[lane] = origin.offset


def _end(rule_set: RuleSet, topic: str) -> End:
    if topic == rule_set.dead_letter_topic:
        return "dead_lettered"
    return "escalated" if topic in rule_set.people_topics else "routed"


def _origin_of_output(headers: Headers) -> Origin | None:
    """From the decision of a routed or escalated ticket, or from a dead letter's headers."""
    for name, value in headers:
        if name == DECISION_HEADER and value is not None:
            try:
                decision = orjson.loads(value)
            except ValueError:
                return None
            return decided_origin(decision) if isinstance(decision, dict) else None
    return stated_origin(headers)
