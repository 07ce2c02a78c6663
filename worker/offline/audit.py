"""The audit: did every ticket that came in end in exactly one place, once, and in order?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import orjson

from worker.adapters.topic_log import Record
from worker.core.envelope import DECISION_HEADER, Headers, Origin, decided_origin, stated_origin
from worker.core.rules import RuleSet
from worker.ports import Partition
from worker.runtime.outputs import origin_in

End = Literal["routed", "escalated", "dead_lettered"]


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

    @property
    def clean(self) -> bool:
        return not (self.missing or self.duplicates or self.out_of_order)


@dataclass(slots=True)
class _Seen:
    """One origin: how often it came in, and where it ended."""

    came_in: int = 0
    committed: bool = False
    ends: Counter[End] = field(default_factory=Counter)


def audit(
    rule_set: RuleSet,
    tickets: Iterable[Record],
    outputs: Iterable[Record],
    committed: Mapping[Partition, int],
) -> Ledger:
    """Compares the topics, read with isolation.level=read_committed, the outputs after the tickets.

    `committed` are the group's offsets, asked before anything was read. Origins that the tickets do not hold (older,
    newer, or of another input topic) are left out.
    """
    seen: dict[Origin, _Seen] = {}
    first: dict[Partition, int] = {}
    count = 0
    for record in tickets:
        origin = origin_in(record.headers, record.partition, record.offset)
        if origin.offset < first.setdefault(record.partition, record.offset):
            continue
        count += 1
        entry = seen.setdefault(origin, _Seen())
        entry.came_in += 1
        entry.committed = record.offset < committed.get(record.partition, 0)
    order = _Order()
    foreign = 0
    for record in outputs:
        stated = _origin_of_output(record.headers)
        if stated is None:
            foreign += 1
        elif (found := seen.get(stated)) is not None:
            found.ends[_end(rule_set, record.partition.topic)] += 1
            if found.came_in == 1:  # what was sent in again has its place by when that was
                order.note(record, stated)
    ends: Counter[End] = Counter()
    missing, duplicates, waiting = [], [], 0
    for origin, entry in seen.items():
        ends.update(entry.ends)
        surplus = entry.ends.total() - entry.came_in
        if surplus > 0:
            duplicates += [origin] * surplus
        elif entry.committed:
            missing += [origin] * -surplus
        else:
            waiting -= surplus
    return Ledger(count, dict(ends), waiting, tuple(missing), tuple(duplicates), tuple(order.violations), foreign)


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
