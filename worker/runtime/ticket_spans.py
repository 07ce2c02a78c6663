"""TicketSpans: the spans of traced tickets from being taken in to being settled, and what is said in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from worker.core.envelope import Envelope
from worker.ports import Delivery, Partition, Settlement
from worker.telemetry import Attribute, Span, SpanName, Tracing, carried


@dataclass(frozen=True, slots=True)
class _Traced:
    epoch: int
    span: Span


class TicketSpans:
    """For a worker that traces nothing, and for a ticket that is not traced, next to nothing happens here."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._open: dict[tuple[Partition, int], _Traced] = {}

    def begin(self, delivery: Delivery) -> Span | None:
        """The span of a ticket that is taken in; None where it is not traced."""
        span = self._tracing.begin(delivery.headers)
        if span is not None:
            span.set(Attribute.MESSAGING_SYSTEM, "kafka")
            span.set(Attribute.MESSAGING_OPERATION, "process")
            span.set(Attribute.MESSAGING_TOPIC, delivery.partition.topic)
            span.set(Attribute.MESSAGING_PARTITION, str(delivery.partition.number))
            span.set(Attribute.MESSAGING_OFFSET, delivery.offset)
            self._open[delivery.partition, delivery.offset] = _Traced(delivery.epoch, span)
        return span

    def carrying(self, delivery: Delivery) -> Delivery:
        """With headers in which the ticket's trace goes on; a ticket that is not traced passes its own on unchanged."""
        traced = self._open.get((delivery.partition, delivery.offset)) if self._open else None
        if traced is None or traced.epoch != delivery.epoch:
            return delivery
        return replace(delivery, headers=carried(delivery.headers, traced.span))

    def settled(self, settlement: Settlement, committed: Mapping[Partition, int], seconds: float) -> None:
        """One attempt to publish what was offered: those before the committed offsets have come to their end."""
        for part, offset, traced in self._offered(settlement):
            if offset < committed.get(part, 0):
                traced.span.past(SpanName.PUBLISH, seconds)
                traced.span.end()
                del self._open[part, offset]
            else:
                traced.span.past(SpanName.PUBLISH, seconds, NotCommitted())

    def failed(self, settlement: Settlement, error: Exception, seconds: float) -> None:
        """The same where nothing is known to be committed, and all is offered again."""
        for _, _, traced in self._offered(settlement):
            traced.span.past(SpanName.PUBLISH, seconds, error)

    def forget(self, partitions: Collection[Partition], committed: Mapping[Partition, int] | None = None) -> None:
        """These partitions belong to others now; of theirs, those before `committed` were settled on the way out."""
        if not self._open:
            return
        for partition, offset in [place for place in self._open if place[0] in partitions]:
            span = self._open.pop((partition, offset)).span
            if committed is not None and offset < committed.get(partition, 0):
                span.past(SpanName.PUBLISH, 0.0)
            else:
                span.fail(PartitionGone())
            span.end()

    def close(self) -> None:
        """What is still open ends here, and is delivered again to whoever comes next."""
        self.forget({partition for partition, _ in self._open})

    def _offered(self, settlement: Settlement) -> list[tuple[Partition, int, _Traced]]:
        if not self._open:
            return []
        found = []
        for part in settlement.partitions:
            for finished in part.finished:
                offset = finished.delivery.offset
                traced = self._open.get((part.partition, offset))
                if traced is not None and traced.epoch == part.epoch:
                    found.append((part.partition, offset, traced))
        return found


class NotCommitted(Exception):
    """Only its name is used, as the status of a span: the settlement left this ticket out."""


class PartitionGone(Exception):
    """Only its name is used, as the status of a span: another worker gets the ticket."""


def say_decided(span: Span, envelope: Envelope) -> None:
    """What was decided; nothing of what the ticket says."""
    span.set(Attribute.ACTION, envelope.action)
    span.set(Attribute.REASON, envelope.reasons[0].code)
    span.set(Attribute.DECISION_ID, envelope.decision_id)
    span.set(Attribute.CACHED, envelope.cached)
    if envelope.category is not None:
        span.set(Attribute.CATEGORY, envelope.category)


def say_dead_letter(span: Span, code: str) -> None:
    """The same of a message that is no ticket."""
    span.set(Attribute.ACTION, "dead_letter")
    span.set(Attribute.REASON, code)
