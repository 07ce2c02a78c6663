"""OffsetTracker: what is in flight, which finished prefix may be settled, and under which assignment."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from worker.ports import (
    Delivery,
    Finished,
    Output,
    Partition,
    PartitionSettlement,
    Settlement,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one assigned partition has come."""

    epoch: int
    newest: int | None
    """Offset of the delivery that was tracked last under this assignment."""
    oldest: int | None
    """Offset of the oldest delivery that is held; None where nothing is."""
    oldest_finished: bool = False


@dataclass(slots=True)
class _Entry:
    delivery: Delivery
    size: int
    outputs: tuple[Output, ...] | None = None


@dataclass(slots=True)
class _Lane:
    """One assigned partition: its deliveries in offset order, oldest first."""

    epoch: int
    entries: deque[_Entry] = field(default_factory=deque)
    by_offset: dict[int, _Entry] = field(default_factory=dict)
    open: int = 0
    newest: int | None = None


class OffsetTracker:
    """Holds every delivery from its arrival until its outputs and offset are settled.

    The committable offset of a partition never passes an open delivery. Results that belong to an earlier assignment
    are dropped. Single-threaded; knows no clock and no I/O.
    """

    def __init__(self) -> None:
        self._lanes: dict[Partition, _Lane] = {}
        self.in_flight = 0
        """Tracked and not yet settled."""
        self.bytes_in_flight = 0

    def assign(self, epochs: Mapping[Partition, int]) -> None:
        """Start these partitions afresh; whatever an older epoch still held is forgotten."""
        for partition, epoch in epochs.items():
            self.forget([partition])
            self._lanes[partition] = _Lane(epoch)

    def forget(self, partitions: Collection[Partition]) -> None:
        """These partitions are no longer ours."""
        for partition in partitions:
            lane = self._lanes.pop(partition, None)
            if lane is not None:
                self.in_flight -= len(lane.entries)
                self.bytes_in_flight -= sum(entry.size for entry in lane.entries)

    def track(self, delivery: Delivery) -> bool:
        """False for a delivery of a partition or epoch that is not ours, or one that is tracked already."""
        lane = self._lanes.get(delivery.partition)
        if lane is None or lane.epoch != delivery.epoch or delivery.offset in lane.by_offset:
            return False
        size = len(delivery.value or b"") + len(delivery.key or b"")
        entry = _Entry(delivery, size)
        lane.entries.append(entry)
        lane.by_offset[delivery.offset] = entry
        lane.open += 1
        lane.newest = delivery.offset
        self.in_flight += 1
        self.bytes_in_flight += size
        return True

    def complete(self, delivery: Delivery, outputs: Sequence[Output]) -> bool:
        """The delivery reached its end. Completing it again replaces its outputs. False: it is not ours any more."""
        lane = self._lanes.get(delivery.partition)
        if lane is None or lane.epoch != delivery.epoch:
            return False
        entry = lane.by_offset.get(delivery.offset)
        if entry is None:
            return False
        lane.open -= entry.outputs is None
        entry.outputs = tuple(outputs)
        return True

    def ready(self, partitions: Collection[Partition] | None = None) -> Settlement:
        """The finished prefix of each partition (or of the named ones). Offering it takes nothing away."""
        found = []
        for partition, lane in self._lanes.items():
            if partitions is not None and partition not in partitions:
                continue
            prefix: list[Finished] = []
            for entry in lane.entries:
                if entry.outputs is None:
                    break
                prefix.append(Finished(entry.delivery, entry.outputs))
            if prefix:
                found.append(PartitionSettlement(partition, lane.epoch, tuple(prefix), prefix[-1].delivery.offset + 1))
        return Settlement(tuple(found))

    def settled(self, settlement: Settlement, committed: Mapping[Partition, int]) -> int:
        """Forget what was committed; returns how many deliveries that were.

        `settlement` is what had been offered: only deliveries in it are forgotten, and only under its epoch.
        """
        count = 0
        for part in settlement.partitions:
            lane = self._lanes.get(part.partition)
            upto = committed.get(part.partition)
            if lane is None or upto is None or lane.epoch != part.epoch:
                continue
            end, entries, by_offset, size = min(upto, part.next_offset), lane.entries, lane.by_offset, 0
            held = len(entries)
            while entries and (offset := entries[0].delivery.offset) < end:
                size += entries.popleft().size
                del by_offset[offset]
            count += held - len(entries)
            self.bytes_in_flight -= size
        self.in_flight -= count
        return count

    def open_deliveries(self, partitions: Collection[Partition] | None = None) -> int:
        """Deliveries without a result, in the named partitions or in all."""
        return sum(lane.open for p, lane in self._lanes.items() if partitions is None or p in partitions)

    def held(self) -> Mapping[Partition, int]:
        """Deliveries held per assigned partition."""
        return {partition: len(lane.entries) for partition, lane in self._lanes.items()}

    def progress(self) -> Mapping[Partition, Progress]:
        """Of every assigned partition."""
        found = {}
        for partition, lane in self._lanes.items():
            oldest = lane.entries[0] if lane.entries else None
            found[partition] = Progress(
                lane.epoch,
                lane.newest,
                oldest.delivery.offset if oldest is not None else None,
                oldest is not None and oldest.outputs is not None,
            )
        return found

    def oldest_timestamp_ms(self) -> int | None:
        """When the oldest message that is held was written; None where none is held or none says when.

        May be called on any thread.
        """
        heads = []
        for lane in list(self._lanes.values()):
            with contextlib.suppress(IndexError):
                heads.append(lane.entries[0].delivery.timestamp_ms)
        return min((head for head in heads if head >= 0), default=None)

    def owns(self, delivery: Delivery) -> bool:
        """Whether the delivery's assignment is still in force."""
        lane = self._lanes.get(delivery.partition)
        return lane is not None and lane.epoch == delivery.epoch
