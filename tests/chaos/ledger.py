"""What became of every ticket, by what lies in the topics alone.

It knows tickets by their bytes, and uses nothing of the worker's: neither its headers nor its readers.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from tests.chaos.workload import Fate, Sent

OPEN_S = 40.0
"""So long after its producer has died a transaction may be open: 15 s, the coordinator's rounds, a loaded machine."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of a topic."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What the group had committed at a moment of the run, by partition of the input topic."""

    taken_ms: int
    committed: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Topics:
    input: str
    human: str
    dead_letter: str
    decisions: str
    routes: Mapping[str, str]
    """Category to topic."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*self.routes.values(), self.human, self.dead_letter, self.decisions)


@dataclass(slots=True)
class Verdict:
    """Every list names tickets as `partition/offset` of the input topic, except where it says otherwise."""

    tickets: int = 0
    ends: Counter[Fate] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    """One entry for each copy too many, in whichever topic."""
    out_of_order: list[str] = field(default_factory=list)
    """Behind a later ticket with the same key, in the same topic."""
    misplaced: list[str] = field(default_factory=list)
    """In a topic in which they must not end."""
    undecided: list[str] = field(default_factory=list)
    """Routed or escalated without exactly one record on the decisions topic."""
    early: list[str] = field(default_factory=list)
    """Offsets that were committed before their output was produced."""
    strange: list[str] = field(default_factory=list)
    """Outputs, as `topic/partition/offset`, that are no ticket of the run."""

    @property
    def problems(self) -> Mapping[str, Sequence[str]]:
        found = {
            "missing": self.missing,
            "duplicates": self.duplicates,
            "order violations": self.out_of_order,
            "in a wrong topic": self.misplaced,
            "without one decision": self.undecided,
            "committed before its output": self.early,
            "from nowhere": self.strange,
        }
        return {name: where for name, where in found.items() if where}


def judge(
    topics: Topics, sent: Iterable[Sent], came_in: Sequence[Entry], came_out: Iterable[Entry], samples: Iterable[Sample]
) -> Verdict:
    """`came_in` is the input topic, `came_out` the output topics, each partition in the order of its offsets."""
    verdict = Verdict(tickets=len(came_in))
    known = {each.value: each for each in sent}
    places = {entry.value: (entry.partition, entry.offset) for entry in came_in}
    if len(places) != len(came_in) or places.keys() != known.keys():
        raise ValueError("what lies in the input topic is not what was sent")
    ends: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    decided: Counter[tuple[int, int]] = Counter()
    lanes: dict[tuple[str, bytes | None, int], tuple[int, int]] = {}
    for entry in came_out:
        if entry.topic == topics.decisions:
            origin = orjson.loads(entry.value or b"")["origin"]
            decided[origin["partition"], origin["offset"]] += 1
            continue
        place = places.get(entry.value)
        if place is None:
            verdict.strange.append(f"{entry.topic}/{entry.partition}/{entry.offset}")
            continue
        copy = place in ends
        ends[place].append(entry)
        verdict.ends[_fate(topics, entry.topic)] += 1
        if not _may_end(topics, known[entry.value or b""], entry.topic):
            verdict.misplaced.append(_name(place))
        if copy:  # steps back by its nature, and is counted as what it is
            continue
        # A key has one partition in every topic, so that one lane holds all that must be in order.
        lane = (entry.topic, entry.key, place[0])
        reached, partition = lanes.setdefault(lane, (-1, entry.partition))
        if place[1] < reached or entry.partition != partition or entry.key != known[entry.value or b""].key:
            verdict.out_of_order.append(_name(place))
        lanes[lane] = (max(reached, place[1]), partition)
    for place in places.values():
        copies = ends.get(place, [])
        if not copies:
            verdict.missing.append(_name(place))
        verdict.duplicates += [_name(place)] * (len(copies) - 1)
        due = 0 if copies and copies[0].topic == topics.dead_letter else 1
        if copies and decided[place] != due:
            verdict.undecided.append(_name(place))
    verdict.early += _early(ends, samples)
    return verdict


def _early(ends: Mapping[tuple[int, int], Sequence[Entry]], samples: Iterable[Sample]) -> list[str]:
    """Records carry the time at which they were handed to the producer, which is before any commit."""
    produced = {place: min(entry.timestamp_ms for entry in copies) for place, copies in ends.items()}
    found: dict[str, None] = {}
    for sample in samples:
        for partition, committed in sample.committed.items():
            for offset in range(committed):
                if produced.get((partition, offset), sample.taken_ms + 1) > sample.taken_ms:
                    found[_name((partition, offset))] = None
    return list(found)


def _fate(topics: Topics, topic: str) -> Fate:
    if topic == topics.dead_letter:
        return "dead_lettered"
    return "escalated" if topic == topics.human else "routed"


def _may_end(topics: Topics, ticket: Sent, topic: str) -> bool:
    if not ticket.ticket:
        return topic == topics.dead_letter
    return topic == topics.human or (ticket.category is not None and topic == topics.routes[ticket.category])


def _name(place: tuple[int, int]) -> str:
    return f"{place[0]}/{place[1]}"


class _Silent:
    def log(self, *_: object) -> None: ...


_SILENT = _Silent()


def read(bootstrap_servers: str, topics: Sequence[str], until: float) -> list[Entry]:
    """All committed records of these topics, each partition in order.

    Raises TimeoutError, by the monotonic clock, where an open transaction hides some or nothing comes.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "chaos.reader",  # demanded by the client
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "logger": _SILENT,
        }
    )
    try:
        places = [
            TopicPartition(topic, number, OFFSET_BEGINNING)
            for topic in topics
            for number in consumer.list_topics(topic, timeout=20).topics[topic].partitions
        ]
        _wait_stable(consumer, bootstrap_servers, places, until)
        found: list[Entry] = []
        open_ends = {(at.topic, at.partition) for at in places}
        consumer.assign(places)
        while open_ends:
            if time.monotonic() >= until:
                raise TimeoutError(f"{len(open_ends)} partitions cannot be read to their ends")
            for message in consumer.consume(1_000, 0.5):
                error = message.error()
                if error is None:
                    found.append(
                        Entry(
                            message.topic() or "",
                            message.partition() or 0,
                            message.offset() or 0,
                            message.key(),
                            message.value(),
                            message.timestamp()[1],
                        )
                    )
                elif error.code() == KafkaError._PARTITION_EOF:
                    open_ends.discard((message.topic() or "", message.partition() or 0))
        return found
    finally:
        consumer.close()


def _wait_stable(reader: Consumer, bootstrap_servers: str, places: Sequence[TopicPartition], until: float) -> None:
    """Until nothing lies behind an open transaction: then a reader of committed records sees all there is."""
    everything = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "chaos.reader",
            "isolation.level": "read_uncommitted",
            "logger": _SILENT,
        }
    )
    give_up_at = min(until, time.monotonic() + OPEN_S)
    try:
        waiting = list(places)
        while True:
            waiting = [at for at in waiting if _end(reader, at) < _end(everything, at)]
            if not waiting:
                return
            if time.monotonic() >= give_up_at:
                names = ", ".join(f"{at.topic}/{at.partition}" for at in waiting)
                raise TimeoutError(f"open transactions that nobody ends hide records of {names}")
            time.sleep(0.5)
    finally:
        everything.close()


def _end(consumer: Consumer, at: TopicPartition) -> int:
    """The last stable offset, or that of the last record, by the consumer's isolation level."""
    for _ in range(5):
        try:
            return int(consumer.get_watermark_offsets(at, timeout=10)[1])
        except KafkaException:
            time.sleep(0.5)
    return int(consumer.get_watermark_offsets(at, timeout=10)[1])
