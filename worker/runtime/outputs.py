"""Outputs: which messages a ticket's end consists of, and what takes their place where the broker refuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from worker.core.cards import blinded, make_card
from worker.core.digest import fingerprint
from worker.core.envelope import (
    ATTEMPT,
    CARD_HEADER,
    DEAD_LETTER_DETAIL,
    DEAD_LETTER_REASON,
    DECISION_HEADER,
    ENVELOPE_SCHEMA,
    POINTER,
    DecisionIds,
    Envelope,
    Origin,
    Timings,
    Would,
    attempt_of,
    dead_letter_headers,
    received_headers,
    stated_origin,
)
from worker.core.policy import Decision, carried_out, escalate_unscored, reason
from worker.core.rules import RuleSet
from worker.core.ticket import Ticket
from worker.errors import InvalidTicket
from worker.ports import Delivery, Headers, Output, Partition, RefusedOutput
from worker.runtime.known_tickets import KnownTickets
from worker.runtime.router import Routed
from worker.telemetry import passed_on


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
    """Builds the messages of one rule set: a decision becomes what the mode of its category lets it be."""

    def __init__(self, rule_set: RuleSet, provenance: Provenance) -> None:
        self._rule_set = rule_set
        self._provenance = provenance
        self._known = KnownTickets()
        self._rule_set_id = f"{rule_set.id}/{rule_set.rules.version}/{rule_set.fingerprint}"
        self._decision_id = DecisionIds(self._rule_set_id, provenance.calibrations)

    def envelope(
        self, delivery: Delivery, ticket: Ticket | None, routed: Routed, decided_at: str, total_s: float
    ) -> Envelope:
        """The decision as it is published. A ticket without an id is known by its origin."""
        decision = carried_out(routed.decision, self._rule_set)
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
            mode=self._rule_set.mode_of(decision.category),
            would=None if decision is routed.decision else would_of(routed.decision),
            nearest=decision.nearest if decision.action == "escalate" else None,
        )

    def decided(self, delivery: Delivery, envelope: Envelope, ticket: Ticket | None = None) -> tuple[Output, ...]:
        """The ticket as received to its topic, with the decision in a header, and for people with a card; the decision
        to its own topic. Without `ticket` nobody looks for others of the same text.
        """
        body = envelope.to_bytes()
        headers = received_headers(delivery.headers)
        attempt = attempt_of(delivery.headers)
        count: Headers = ((ATTEMPT, str(attempt).encode()),) if attempt else ()
        duplicates = None if ticket is None else self._known.meet(ticket, envelope)
        ours: Headers = ((DECISION_HEADER, body),)
        if envelope.action == "escalate":
            shown = blinded(envelope).to_bytes() if envelope.mode == "shadow" else body
            card = make_card(envelope, self._rule_set, duplicates)
            ours = ((DECISION_HEADER, shown), (CARD_HEADER, card.to_bytes()))
        return (
            Output(envelope.topic, delivery.key, delivery.value, (*headers, *ours, *count)),
            Output(self._rule_set.decisions_topic, delivery.key, body, passed_on(headers)),
        )

    def dead_letter(self, delivery: Delivery, error: InvalidTicket) -> tuple[Output, ...]:
        """Bytes that are no ticket: as they came, with the reason and where they came from."""
        headers = dead_letter_headers(delivery.headers, origin_of(delivery), error.code, error.detail)
        return (Output(self._rule_set.dead_letter_topic, delivery.key, delivery.value, headers),)

    def instead_of(
        self, refused: Sequence[RefusedOutput], outputs: Sequence[Output], decided_at: str
    ) -> tuple[Output, ...] | None:
        """What to send for a delivery where the broker took some of its `outputs` and refused these for good.

        A category topic's ticket goes to people; what the human topic refuses loses its card, and then becomes a dead
        letter; a dead letter that does not fit becomes a pointer to its origin. None: nothing is left to try.
        """
        delivery = refused[0].delivery
        topics = {item.output.topic: item for item in refused}
        rules = self._rule_set
        dead = topics.get(rules.dead_letter_topic)
        if dead is not None:
            if any(name == POINTER for name, _ in dead.output.headers):
                return None
            told = dict(dead.output.headers)
            code = (told.get(DEAD_LETTER_REASON) or b"undeliverable").decode(errors="replace")
            detail = (told.get(DEAD_LETTER_DETAIL) or b"").decode(errors="replace")
            # As the refused one, so that whoever asks for a reason finds the pointers, too.
            said = f"{dead.code}; {detail}" if detail else dead.code
            origin_only = (*dead_letter_headers((), origin_of(delivery), code, said), (POINTER, b"value"))
            return (replace(dead.output, key=None, value=None, headers=origin_only),)
        people = topics.get(rules.human_topic)
        if people is not None:
            plain = tuple(pair for pair in people.output.headers if pair[0] != CARD_HEADER)
            if len(plain) < len(people.output.headers):
                kept = (output for output in outputs if output.topic not in (rules.human_topic, *topics))
                return (replace(people.output, headers=plain), *kept)
            return self.dead_letter(delivery, InvalidTicket("undeliverable", people.code))
        routes = [item for topic, item in topics.items() if topic != rules.decisions_topic]
        if routes:
            why = reason("topic_refused", topic=routes[0].output.topic, detail=routes[0].code)
            decision = escalate_unscored(rules, why)
            return self.decided(delivery, self.envelope(delivery, None, Routed(decision), decided_at, 0.0))
        # Only the decision's own record was refused: the decision still travels in the ticket's header.
        return tuple(output for output in outputs if output.topic != rules.decisions_topic)


def would_of(decision: Decision) -> Would:
    """What auto does with a decision to route."""
    return Would(
        category=decision.category or "",
        topic=decision.topic,
        probability=decision.probability,
        reasons=decision.reasons,
        certificate=None if decision.nearest is None else decision.nearest.certificate,
    )
