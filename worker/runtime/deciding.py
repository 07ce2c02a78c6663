"""Decider: a ticket that no topic holds, as bytes, to the decision that a worker would publish of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from worker.core.envelope import Envelope
from worker.core.http_ticket import http_origin
from worker.core.rules import RuleSet
from worker.core.ticket import Ticket, parse_ticket
from worker.errors import EngineUnavailable
from worker.ports import Delivery, Output, Partition
from worker.runtime.outputs import Outputs
from worker.runtime.router import Routed, Router

LATER = frozenset({"engine_unavailable", "engine_timeout"})
"""Reasons that say nothing of the ticket: there is no decision yet, and the same request may succeed."""


@dataclass(frozen=True, slots=True)
class Decided:
    """One ticket's decision, with what it was made of."""

    delivery: Delivery
    """As if it had come from the topic that `http_origin` states; without key and headers."""
    ticket: Ticket
    routed: Routed
    envelope: Envelope


class Decider:
    """What `POST /v1/decide` and `ticket-router decide` have in common: everything but who asks."""

    def __init__(
        self,
        *,
        rule_set: RuleSet,
        router: Router,
        outputs: Outputs,
        max_bytes: int,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._rule_set = rule_set
        self._router = router
        self._outputs = outputs
        self._max_bytes = max_bytes
        self._clock = clock
        self._now = now

    async def decide(self, body: bytes) -> Decided:
        """Raises InvalidTicket; EngineUnavailable where the engine could not be asked, for which no decision is made
        up."""
        started = self._clock()
        ticket = read_ticket(body, self._rule_set, self._max_bytes)
        routed = await self._router.route(ticket)
        if (trouble := not_asked(routed)) is not None:
            raise EngineUnavailable(trouble)
        origin = http_origin(ticket)
        delivery = Delivery(Partition(origin.topic, origin.partition), origin.offset, 0, None, body, (), -1)
        decided_at = self._now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        envelope = self._outputs.envelope(delivery, ticket, routed, decided_at, self._clock() - started)
        return Decided(delivery, ticket, routed, envelope)

    def messages(self, decided: Decided) -> tuple[Output, ...]:
        """What a worker would produce for it."""
        return self._outputs.decided(decided.delivery, decided.envelope, decided.ticket)


def read_ticket(body: bytes, rule_set: RuleSet, max_bytes: int) -> Ticket:
    """The ticket in these bytes, as the rule set reads them. Raises InvalidTicket."""
    return parse_ticket(body, rule_set.rules.intake, max_bytes, rule_set.categories.prompt.canonicalise)


def not_asked(routed: Routed) -> str | None:
    """Why the engine could not be asked, in a sentence; None where it was, or was not needed."""
    if routed.decision.scores is None:
        for why in routed.decision.reasons:
            if why.code in LATER:
                return why.sentence
    return None
