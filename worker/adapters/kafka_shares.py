"""What of a settlement goes into a transaction: of each partition the longest prefix of which no refusal is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from worker.adapters.kafka_client import REFUSALS
from worker.adapters.kafka_refusals import Foresight, Refusal
from worker.errors import StreamRetriable
from worker.ports import Finished, Partition, PartitionSettlement, RefusedOutput, Settled


@dataclass(frozen=True, slots=True)
class Share:
    """One partition's part of a transaction."""

    partition: Partition
    finished: Sequence[Finished]
    next_offset: int
    obstacles: Sequence[Refusal]
    """Why the prefix ends where it ends, and what else of the partition is refused."""
    committed: int | None
    """The offset that turned out to be committed, where the settlement still held entries before it."""


def share_of(settlement: PartitionSettlement, committed: int, foresight: Foresight, deadline: float) -> Share:
    """`committed` is the last offset known to be committed, -1 where none is."""
    finished: Sequence[Finished] = settlement.finished
    if finished and finished[0].delivery.offset < committed:
        finished = [each for each in finished if each.delivery.offset >= committed]
    news = committed if len(finished) < len(settlement.finished) else None
    prefix, next_offset = finished, settlement.next_offset
    obstacles: list[Refusal] = []
    for index, each in enumerate(finished):
        found = foresight.refusal(each, deadline)
        if found is None:
            continue
        if not obstacles:
            prefix, next_offset = finished[:index], each.delivery.offset
        obstacles.append(Refusal(each, *found))
        if found[1].code() not in REFUSALS:
            break  # the brokers do not answer: those behind it would only be asked about in vain
    return Share(settlement.partition, prefix, next_offset, obstacles, news)


def offsets_of(shares: Iterable[Share], committed: Mapping[Partition, int]) -> dict[Partition, int]:
    """Those that move: an offset that stays where it was is not sent."""
    return {
        share.partition: share.next_offset
        for share in shares
        if (share.finished or not share.obstacles) and share.next_offset > committed.get(share.partition, -1)
    }


def settled_by(shares: Sequence[Share], offsets: Mapping[Partition, int]) -> Settled:
    """What a settlement amounts to once these offsets are committed."""
    committed = {share.partition: share.committed for share in shares if share.committed is not None}
    return Settled(
        {**committed, **offsets}, tuple(refused_in(obstacle for share in shares for obstacle in share.obstacles))
    )


def refused_in(refusals: Iterable[Refusal]) -> list[RefusedOutput]:
    """Those that another attempt cannot cure."""
    return [
        RefusedOutput(finished.delivery, output, error.name(), f"topic {output.topic!r}: {error.str()}")
        for finished, output, error in refusals
        if error.code() in REFUSALS
    ]


def without_transaction(settled: Settled, shares: Iterable[Share]) -> Settled:
    """Nothing can be added to what is committed already. Raises StreamRetriable where that is nothing at all."""
    if settled.committed or settled.refused:
        return settled
    for share in shares:
        for _, output, error in share.obstacles:
            raise StreamRetriable(f"output to topic {output.topic!r} cannot be produced now: {error.str()}")
    return settled
