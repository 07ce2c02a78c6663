"""A broker, a ticket stream and a score cache in memory: whole contracts, for one process and as long as it lives."""

from __future__ import annotations

import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from worker.core.scores import LabelScores
from worker.errors import ConfigError, StreamFatal, StreamRetriable
from worker.ports import (
    AssignmentListener,
    Delivery,
    Finished,
    Headers,
    Output,
    Partition,
    PartitionSettlement,
    Paused,
    RefusedOutput,
    Settled,
    Settlement,
)


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """One message at rest."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int


class _Group:
    """Members in the order of their joining, who owns which partition, and what is committed."""

    def __init__(self) -> None:
        self.members: list[MemoryStream] = []
        self.owners: dict[Partition, MemoryStream] = {}
        self.committed: dict[Partition, int] = {}

    def targets(self, partitions: Sequence[Partition]) -> dict[Partition, MemoryStream]:
        """An even split that moves no more than it must, as the cooperative-sticky assignor does."""
        if not self.members:
            return {}
        quota, larger = divmod(len(partitions), len(self.members))
        room = {member: quota + (position < larger) for position, member in enumerate(self.members)}
        split = {}
        for partition in partitions:
            owner = self.owners.get(partition)
            if owner is not None and room.get(owner, 0) > 0:
                split[partition] = owner
                room[owner] -= 1
        free = [member for member in self.members for _ in range(room[member])]
        for partition in partitions:
            if partition not in split:
                split[partition] = free.pop(0)
        return split


class MemoryBroker:
    """Topics, groups and the faults a broker can have. Streams of several threads may share one."""

    def __init__(
        self,
        topics: Mapping[str, int],
        *,
        max_message_bytes: int = 1_000_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`topics` gives the number of partitions; `clock` Unix seconds for timestamps."""
        self.changed = threading.Condition(threading.RLock())
        """Held for every look at the broker's state; notified when something may be deliverable."""
        self._logs: dict[str, list[list[MemoryRecord]]] = {}
        self._groups: dict[str, _Group] = {}
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._down = False
        self._refusals: dict[str, str] = {}
        self._commits_to_fail = 0
        for topic, partitions in topics.items():
            self.create_topic(topic, partitions)

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        with self.changed:
            self._logs.setdefault(topic, [[] for _ in range(partitions)])
            self.changed.notify_all()

    def partitions(self, topic: str) -> Sequence[Partition]:
        """Empty for a topic that does not exist."""
        with self.changed:
            return [Partition(topic, number) for number in range(len(self._logs.get(topic, ())))]

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> MemoryRecord:
        """Equal keys share a partition; without a key, partitions take turns. Raises KeyError: no such topic."""
        with self.changed:
            logs = self._logs[topic]
            if partition is None:
                turn = sum(len(log) for log in logs)
                partition = (zlib.crc32(key) if key is not None else turn) % len(logs)
            at_ms = int(self._clock() * 1_000) if timestamp_ms is None else timestamp_ms
            offset = len(logs[partition])
            record = MemoryRecord(Partition(topic, partition), offset, key, value, headers, at_ms)
            logs[partition].append(record)
            self.changed.notify_all()
            return record

    def records(self, topic: str) -> Sequence[MemoryRecord]:
        """All messages of a topic, by partition and offset."""
        with self.changed:
            return [record for log in self._logs.get(topic, ()) for record in log]

    def committed(self, group_id: str) -> Mapping[Partition, int]:
        """Next offset per partition."""
        with self.changed:
            return dict(self.group(group_id).committed)

    def group(self, group_id: str) -> _Group:
        return self._groups.setdefault(group_id, _Group())

    # Faults

    @property
    def down(self) -> bool:
        return self._down

    def set_down(self, down: bool) -> None:
        """While down nothing is delivered, settled or rebalanced."""
        with self.changed:
            self._down = down
            self.changed.notify_all()

    def refuse(self, topic: str, code: str | None) -> None:
        """From now on outputs to this topic are refused with this code; None ends that."""
        with self.changed:
            if code is None:
                self._refusals.pop(topic, None)
            else:
                self._refusals[topic] = code

    def fail_commits(self, count: int) -> None:
        """The next commits fail after their outputs were taken."""
        with self.changed:
            self._commits_to_fail = count

    def expel(self, stream: MemoryStream) -> None:
        """End a member's session: its partitions go to others at once, and it learns of it in its next poll.

        A stream that is not polled again is thereby a process that died.
        """
        with self.changed:
            stream.remove_from_group()
            self.changed.notify_all()

    # For MemoryStream, under the lock

    def read(self, partition: Partition, offset: int, count: int) -> Sequence[MemoryRecord]:
        return self._logs[partition.topic][partition.number][offset : offset + count]

    def end(self, partition: Partition) -> int:
        return len(self._logs[partition.topic][partition.number])

    def refusal(self, output: Output) -> tuple[str, str] | None:
        if output.topic not in self._logs:
            return "UNKNOWN_TOPIC_OR_PART", f"topic {output.topic!r} does not exist"
        if output.topic in self._refusals:
            return self._refusals[output.topic], f"topic {output.topic!r} refuses messages"
        size = len(output.key or b"") + len(output.value or b"")
        size += sum(len(name.encode()) + len(value or b"") for name, value in output.headers)
        if size > self._max_message_bytes:
            return "MSG_SIZE_TOO_LARGE", f"{size} bytes, and {self._max_message_bytes} are allowed"
        return None

    def commit(self, group_id: str, offsets: Mapping[Partition, int]) -> bool:
        if self._commits_to_fail:
            self._commits_to_fail -= 1
            return False
        self.group(group_id).committed.update(offsets)
        return True


class MemoryStream:
    """TicketStream on a MemoryBroker. Rebalances are cooperative: only partitions that move are revoked."""

    def __init__(self, broker: MemoryBroker, topic: str, group_id: str = "ticket-router") -> None:
        self._broker = broker
        self._topic = topic
        self._group_id = group_id
        self._listener: AssignmentListener | None = None
        self._epochs: dict[Partition, int] = {}
        self._positions: dict[Partition, int] = {}
        self._last_epoch = 0
        self._paused = Paused()

    def open(self, listener: AssignmentListener) -> None:
        with self._broker.changed:
            if self._broker.down:
                raise ConfigError(f"input topic {self._topic!r}: no broker answers")
            if not self._broker.partitions(self._topic):
                raise ConfigError(f"input topic {self._topic!r} does not exist: create it or correct its name")
            self._listener = listener
            self._group.members.append(self)
            self._broker.changed.notify_all()

    def poll(self, max_records: int, timeout_s: float) -> Sequence[Delivery]:
        listener = self._opened()
        until = time.monotonic() + timeout_s
        while True:
            if not self._broker.down:
                self._rebalance(listener)
            with self._broker.changed:
                deliveries = [] if self._broker.down else self._take(max_records)
                left_s = until - time.monotonic()
                if deliveries or left_s <= 0:
                    return deliveries
                self._broker.changed.wait(min(left_s, 0.05))

    def set_paused(self, paused: Paused) -> None:
        self._paused = paused

    def settle(self, settlement: Settlement) -> Settled:
        self._opened()
        with self._broker.changed:
            if self._broker.down:
                raise StreamRetriable("no broker answers")
            offsets: dict[Partition, int] = {}
            refused: list[RefusedOutput] = []
            for part in settlement.partitions:
                if self._epochs.get(part.partition) != part.epoch:
                    continue
                upto = self._produce(part, refused)
                if upto is not None:
                    offsets[part.partition] = upto
            # A member that was expelled and has not noticed produces all the same; only its commit is refused.
            own = {p: offset for p, offset in offsets.items() if self._group.owners.get(p) is self}
            committed = own if own and self._broker.commit(self._group_id, own) else {}
            if offsets and not committed and not refused:
                raise StreamRetriable("the commit was refused")
            return Settled(committed, tuple(refused))

    def assignment(self) -> Mapping[Partition, int]:
        return dict(self._epochs)

    def lag(self) -> Mapping[Partition, int | None]:
        with self._broker.changed:
            return {p: self._broker.end(p) - position for p, position in self._positions.items()}

    def trouble(self) -> str | None:
        return "no broker answers" if self._broker.down else None

    def close(self) -> None:
        if self._listener is None:
            return
        self._release(self._listener, list(self._epochs))
        with self._broker.changed:
            self.remove_from_group()
            self._broker.changed.notify_all()
        self._listener = None

    def remove_from_group(self) -> None:
        """For the broker, under its lock."""
        group = self._group
        if self in group.members:
            group.members.remove(self)
        group.owners = {p: owner for p, owner in group.owners.items() if owner is not self}

    @property
    def _group(self) -> _Group:
        return self._broker.group(self._group_id)

    def _opened(self) -> AssignmentListener:
        if self._listener is None:
            raise StreamFatal("the stream is not open")
        return self._listener

    def _rebalance(self, listener: AssignmentListener) -> None:
        """One step towards the group's targets. The listener is called without the lock: it may wait for others."""
        with self._broker.changed:
            expelled = self not in self._group.members
            if expelled:
                self._group.members.append(self)
        if expelled and self._epochs:
            lost = list(self._epochs)
            self._forget(lost)
            listener.lost(lost)
        with self._broker.changed:
            targets = self._group.targets(self._broker.partitions(self._topic))
        leaving = [partition for partition in self._epochs if targets.get(partition) is not self]
        if leaving:
            self._release(listener, leaving)
        with self._broker.changed:
            owners = self._group.owners
            coming = [p for p, member in targets.items() if member is self and p not in owners]
            epochs = {}
            for partition in coming:
                owners[partition] = self
                self._last_epoch += 1
                epochs[partition] = self._last_epoch
                self._positions[partition] = self._group.committed.get(partition, 0)
            self._epochs.update(epochs)
        if epochs:
            listener.assigned(epochs)

    def _release(self, listener: AssignmentListener, leaving: Sequence[Partition]) -> None:
        if not leaving:
            return
        try:
            settled = self.settle(listener.revoking(leaving))
        except StreamRetriable:
            settled = Settled()
        self._forget(leaving)
        with self._broker.changed:
            for partition in leaving:
                if self._group.owners.get(partition) is self:
                    del self._group.owners[partition]
            self._broker.changed.notify_all()
        listener.released(leaving, settled)

    def _forget(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._epochs.pop(partition, None)
            self._positions.pop(partition, None)

    def _take(self, max_records: int) -> list[Delivery]:
        """Partitions share what may be taken, so that a backlog on one does not hide another."""
        open_partitions = [p for p in self._epochs if not (self._paused.everything or p in self._paused.partitions)]
        deliveries: list[Delivery] = []
        for done, partition in enumerate(open_partitions):
            share = -(-(max_records - len(deliveries)) // (len(open_partitions) - done))
            for record in self._broker.read(partition, self._positions[partition], share):
                deliveries.append(
                    Delivery(
                        partition,
                        record.offset,
                        self._epochs[partition],
                        record.key,
                        record.value,
                        record.headers,
                        record.timestamp_ms,
                    )
                )
                self._positions[partition] = record.offset + 1
        return deliveries

    def _produce(self, part: PartitionSettlement, refused: list[RefusedOutput]) -> int | None:
        """Produces up to the first delivery that has a refused output; the offset to commit, None for nothing."""
        for index, finished in enumerate(part.finished):
            refusal = self._refusal(finished)
            if refusal is not None:
                refused.append(refusal)
                return finished.delivery.offset if index else None
            for output in finished.outputs:
                self._broker.produce(output.topic, output.key, output.value, output.headers)
        return part.next_offset

    def _refusal(self, finished: Finished) -> RefusedOutput | None:
        for output in finished.outputs:
            found = self._broker.refusal(output)
            if found is not None:
                return RefusedOutput(finished.delivery, output, *found)
        return None


ENTRY_BYTES, LABEL_BYTES = 460, 32
"""Of an entry of a MemoryCache and of each label in it (CPython 3.11: 430 to 610 for 2 to 8 labels), rounded up."""


class MemoryCache:
    """ScoreCache that keeps the most recently used entries, each for at most `ttl_s` seconds of `clock`.

    `counters` counts keys: `hits` and `misses`.
    """

    def __init__(
        self,
        max_entries: int = 10_000,
        ttl_s: float = 3_600.0,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = 2**40,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, LabelScores]] = OrderedDict()
        self._bytes = 0
        self.counters: dict[str, int] = {"hits": 0, "misses": 0}

    async def get_many(self, keys: Sequence[str]) -> Sequence[LabelScores | None]:
        now, entries = self._clock(), self._entries
        found = [self._get(key, now) if key in entries else None for key in keys]
        hits = sum([each is not None for each in found])  # `count` would compare scores with None field by field
        self.counters["misses"] += len(found) - hits
        self.counters["hits"] += hits
        return found

    async def put_many(self, items: Mapping[str, LabelScores]) -> None:
        expires_at, entries = self._clock() + self._ttl_s, self._entries
        for key, scores in items.items():
            if key in entries:
                self._forget(key)
            entries[key] = (expires_at, scores)
            self._bytes += _entry_bytes(scores)
        while len(entries) > self._max_entries or self._bytes > self._max_bytes:
            _, (_, scores) = entries.popitem(last=False)
            self._bytes -= _entry_bytes(scores)

    async def probe(self) -> str | None:
        return None

    async def aclose(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def _forget(self, key: str) -> None:
        _, scores = self._entries.pop(key)
        self._bytes -= _entry_bytes(scores)

    def _get(self, key: str, now: float) -> LabelScores | None:
        expires_at, scores = self._entries[key]
        if now >= expires_at:
            self._forget(key)
            return None
        self._entries.move_to_end(key)
        return scores


def _entry_bytes(scores: LabelScores) -> int:
    return ENTRY_BYTES + LABEL_BYTES * (len(scores.logprobs) + len(scores.unknown))
