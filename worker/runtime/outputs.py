"""Outputs: which messages a ticket's end consists of, and what takes their place where the broker refuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from worker.core.digest import fingerprint
from worker.core.envelope import (
    ATTEMPT,
    DECISION_HEADER,
    ENVELOPE_SCHEMA,
    POINTER,
    DecisionIds,
    Envelope,
    Origin,
    Timings,
    attempt_of,
    dead_letter_headers,
    received_headers,
    stated_origin,
)
from worker.core.policy import escalate_unscored, reason
from worker.core.rules import RuleSet
from worker.core.ticket import Ticket
from worker.errors import InvalidTicket
from worker.ports import Delivery, Headers, Output, Partition, RefusedOutput
from worker.runtime.router import Routed


@dataclass(frozen=True, slots=True)
class Provenance:
    """What decided; the same for every ticket of a worker."""

    engine: str | None
    model: str | None
    calibration: str | None
    """Digest of the artefact in force."""
    further: tuple[str | None, ...] = ()
    """Digests of those in force for the further questions, in their order."""

    @property
    def calibrations(self) -> str | None:
        """Everything calibrated that may decide: what a decision's id depends on."""
        if not self.further:
            return self.calibration
        digests = (self.calibration, *self.further)
        return fingerprint("calibrations/1", *(digest or "uncalibrated" for digest in digests))


def origin_in(headers: Headers, partition: Partition, offset: int) -> Origin:
    """Where a ticket first came in: stated in the headers of one that was sent in again, else where it lies.

    Believed only where it can be true: an earlier message of the same partition. Everything else is a forgery or comes
    from another topic, whose offsets mean nothing here.
    """
    stated = stated_origin(headers)
    if stated is not None and (stated.topic, stated.partition) == partition and stated.offset < offset:
        return stated
    return Origin(partition.topic, partition.number, offset)


def origin_of(delivery: Delivery) -> Origin:
    return origin_in(delivery.headers, delivery.partition, delivery.offset)


class Outputs:
    """Builds the messages of one rule set."""

    def __init__(self, rule_set: RuleSet, provenance: Provenance) -> None:
        self._rule_set = rule_set
        self._provenance = provenance
        self._rule_set_id = f"{rule_set.id}/{rule_set.rules.version}/{rule_set.fingerprint}"
        self._decision_id = DecisionIds(self._rule_set_id, provenance.calibrations)

    def envelope(
        self, delivery: Delivery, ticket: Ticket | None, routed: Routed, decided_at: str, total_s: float
    ) -> Envelope:
        """The decision as it is published. A ticket without an id is known by its origin."""
        decision = routed.decision
        origin = origin_of(delivery)
        asked = decision.scores is not None or any(answer.label_scores for answer in decision.answers)
        return Envelope(
            schema=ENVELOPE_SCHEMA,
            decision_id=self._decision_id(origin),
            ticket_id=(ticket.id if ticket else None) or f"{origin.topic}/{origin.partition}/{origin.offset}",
            tenant=ticket.tenant if ticket else None,
            origin=origin,
            decided_at=decided_at,
            action=decision.action,
            category=decision.category,
            topic=decision.topic,
            probability=decision.probability,
            top=decision.top,
            margin=decision.margin,
            label_mass=decision.scores.mass if decision.scores else None,
            reasons=decision.reasons,
            rule_set=self._rule_set_id,
            calibration=self._provenance.calibration,
            engine=self._provenance.engine if asked else None,
            model=self._provenance.model if asked else None,
            cached=routed.cached,
            timings=Timings(
                total_ms=round(total_s * 1000, 3),
                score_ms=None if routed.score_s is None else round(routed.score_s * 1000, 3),
            ),
            labels=self._rule_set.categories.ids,
            label_scores=decision.scores.returned if decision.scores else None,
            label_scores_bound=decision.scores.bound if decision.scores else None,
            answers=decision.answers,
        )

    def decided(self, delivery: Delivery, envelope: Envelope) -> tuple[Output, ...]:
        """The ticket as received to its topic, with the decision in a header; the decision to its own topic."""
        body = envelope.to_bytes()
        headers = received_headers(delivery.headers)
        attempt = attempt_of(delivery.headers)
        count: Headers = ((ATTEMPT, str(attempt).encode()),) if attempt else ()
        return (
            Output(envelope.topic, delivery.key, delivery.value, (*headers, (DECISION_HEADER, body), *count)),
            Output(self._rule_set.decisions_topic, delivery.key, body, _trace(headers)),
        )

    def dead_letter(self, delivery: Delivery, error: InvalidTicket) -> tuple[Output, ...]:
        """Bytes that are no ticket: as they came, with the reason and where they came from."""
        headers = dead_letter_headers(delivery.headers, origin_of(delivery), error.code, error.detail)
        return (Output(self._rule_set.dead_letter_topic, delivery.key, delivery.value, headers),)

    def instead_of(
        self, refused: Sequence[RefusedOutput], outputs: Sequence[Output], decided_at: str
    ) -> tuple[Output, ...] | None:
        """What to send for a delivery where the broker took some of its `outputs` and refused these for good.

        A category topic's ticket goes to people; what people's topic refuses becomes a dead letter; a dead letter that
        does not fit becomes a pointer to its origin. None: nothing is left to try.
        """
        delivery = refused[0].delivery
        topics = {item.output.topic: item for item in refused}
        rules = self._rule_set
        dead = topics.get(rules.dead_letter_topic)
        if dead is not None:
            if any(name == POINTER for name, _ in dead.output.headers):
                return None
            origin_only = (
                *dead_letter_headers((), origin_of(delivery), "undeliverable", dead.code),
                (POINTER, b"value"),
            )
            return (replace(dead.output, key=None, value=None, headers=origin_only),)
        people = topics.get(rules.human_topic)
        if people is not None:
            return self.dead_letter(delivery, InvalidTicket("undeliverable", people.code))
        routes = [item for topic, item in topics.items() if topic != rules.decisions_topic]
        if routes:
            why = reason("topic_refused", topic=routes[0].output.topic, detail=routes[0].code)
            decision = escalate_unscored(rules, why)
            return self.decided(delivery, self.envelope(delivery, None, Routed(decision), decided_at, 0.0))
        # Only the decision's own record was refused: the decision still travels in the ticket's header.
        return tuple(output for output in outputs if output.topic != rules.decisions_topic)


def _trace(headers: tuple[tuple[str, bytes | None], ...]) -> tuple[tuple[str, bytes | None], ...]:
    """The trace context only: a decision record is about the ticket, not a copy of it."""
    return tuple(pair for pair in headers if pair[0] in {"traceparent", "tracestate"})
