"""Router: one ticket to one decision; what is asked about it, in which order, and what the answers make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from worker.core.answers import raise_by_answers, read_answer, unanswered
from worker.core.envelope import Answer, Reason
from worker.core.per_ticket import per_ticket
from worker.core.policy import (
    Calibration,
    Decision,
    NoCalibration,
    decide,
    decide_override,
    escalate_unscored,
    read_in_part,
    reason,
    vetoed,
)
from worker.core.primitives import Primitive
from worker.core.questions import FurtherQuestion
from worker.core.rules import RuleSet
from worker.core.steering import Checked, left_of, still_routes
from worker.core.suspicion import Flagger, Passage
from worker.core.ticket import Ticket
from worker.runtime.asking import Asker, Outcome
from worker.runtime.quota import TenantQuota
from worker.runtime.reading import Reader
from worker.telemetry import SpanName, step

LOOKED_AT = 256
"""Texts whose passages are remembered."""


@per_ticket
class Routed:
    """A decision, with what it took."""

    decision: Decision
    cached: bool = False
    score_s: float | None = None
    """Waiting for the batch and the engine; None where it was not asked."""
    read: str | None = None
    """What was asked about, where that is not the whole text of the ticket."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One of the rule set's further questions, put to the engine, with the calibration that it has."""

    question: FurtherQuestion
    primitive: Primitive
    calibration: Calibration | NoCalibration
    cache_key: Callable[[str | None, str], str]


OnChecked = Callable[[Ticket, Checked], None]
"""After every ticket that would have routed and in which something addresses the router."""


@dataclass(frozen=True, slots=True)
class Safeguards:
    """What stands between a ticket's author and the decision. Each can only turn a route into an escalation."""

    reader: Reader | None = None
    """None: tickets are read whole."""
    flagger: Flagger | None = None
    other_order: tuple[Primitive, Callable[[str | None, str], str]] | None = None
    """The question with its categories in another order, and the cache key of its scores; see gates.other_order."""
    quota: TenantQuota | None = None
    on_checked: OnChecked = lambda *_: None


class Router:
    """Asks about one ticket and decides. Every ticket gets a decision: failing to score it is one."""

    def __init__(
        self,
        *,
        rule_set: RuleSet,
        primitive: Primitive,
        calibration: Calibration | NoCalibration,
        cache_key: Callable[[str | None, str], str],
        asker: Asker,
        clock: Callable[[], float],
        further: Sequence[Asked] = (),
        safeguards: Safeguards | None = None,
    ) -> None:
        self._safe = safeguards or Safeguards()
        # A ticket is looked at when it was scored and when it would route, and equal ones come together.
        self._passages: Callable[[str], tuple[Passage, ...]] = lru_cache(LOOKED_AT)(
            self._safe.flagger.find if self._safe.flagger is not None else lambda _: ()
        )
        self._rule_set = rule_set
        self._primitive = primitive
        self._calibration = calibration
        self._cache_key = cache_key
        self._asker = asker
        self._clock = clock
        self._further = tuple(further)

    async def route(self, ticket: Ticket) -> Routed:
        """Never raises but for cancellation and bugs."""
        return self.without_asking(ticket) or await self.ask(ticket)

    def without_asking(self, ticket: Ticket) -> Routed | None:
        """What a rule says of the ticket by itself; None where it has to be asked about."""
        with step(SpanName.DECIDE) as deciding:
            override = decide_override(ticket, self._rule_set)
            if override is None:
                deciding.drop()
                return None
        return Routed(override)

    async def ask(self, ticket: Ticket) -> Routed:
        """A ticket that no override decides. Never raises but for cancellation and bugs."""
        whole = ticket.text
        if ticket.shortened is not None:  # overrides read the whole ticket, everything from here on what is scored
            ticket = replace(ticket, text=ticket.shortened, shortened=None)
        quota = self._safe.quota
        if quota is not None and not quota.admits(ticket.tenant, len(ticket.text)):
            return Routed(escalate_unscored(self._rule_set, reason("over_quota", characters=quota.characters)))
        started = self._clock()
        reader, cut = self._safe.reader, False
        if reader is not None and not reader.needs_no_cut(ticket.text):
            fitted = await self._asker.read(reader, ticket.text)
            if isinstance(fitted, Reason):
                return Routed(escalate_unscored(self._rule_set, fitted))
            ticket, cut = replace(ticket, text=fitted.text) if fitted.cut else ticket, fitted.cut
        outcome, answers = await self._ask_everything(ticket)
        asked_again = False
        if isinstance(outcome.result, Reason):
            decision = escalate_unscored(self._rule_set, outcome.result)
        else:
            with step(SpanName.DECIDE):
                decision = decide(outcome.result, self._rule_set, self._calibration)
                if decision.action == "route" and not (cut and self._rule_set.rules.length.when_cut == "escalate"):
                    decision, asked_again = await self._doubted(decision, ticket)
        if reader is not None and cut:
            decision = read_in_part(decision, self._rule_set, reader.budget.tokens)
        asked_any = outcome.asked or asked_again or any(asked for _, asked in answers)
        score_s = self._clock() - started if asked_any else None
        if self._further:
            decision = raise_by_answers(decision, [answer for answer, _ in answers], self._rule_set)
        read = None if ticket.text == whole else ticket.text
        return Routed(decision, cached=outcome.cached, score_s=score_s, read=read)

    async def _ask_everything(self, ticket: Ticket) -> tuple[Outcome, list[tuple[Answer, bool]]]:
        """The rule set's own question and the further ones at once: they share cache round trips and batches."""
        if not self._further:
            return await self._scores(self._primitive, self._cache_key, ticket), []
        tasks = [asyncio.create_task(self._answer(asked, ticket)) for asked in self._further]
        try:
            outcome = await self._scores(self._primitive, self._cache_key, ticket)
            return outcome, list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _doubted(self, decision: Decision, ticket: Ticket) -> tuple[Decision, bool]:
        """A decision to route, or the escalation that a second look makes of it; and whether the engine was asked."""
        unsteered, asked = await self._unsteered(decision, ticket)
        if unsteered.action != "route" or self._safe.other_order is None:
            return unsteered, asked
        gate = self._rule_set.rules.gates.other_order_margin
        if gate is None or decision.margin is None or decision.margin >= gate:
            return unsteered, asked
        primitive, cache_key = self._safe.other_order
        outcome = await self._scores(primitive, cache_key, ticket)
        if isinstance(outcome.result, Reason):
            return vetoed(decision, self._rule_set, outcome.result), True
        other = self._rule_set.categories.ids[outcome.result.best_known]
        first = self._rule_set.categories.ids[decision.scores.best_known] if decision.scores else decision.category
        if other not in (decision.category, first):
            decision = vetoed(decision, self._rule_set, reason("other_order", category=other))
        return decision, asked or outcome.asked

    async def _unsteered(self, decision: Decision, ticket: Ticket) -> tuple[Decision, bool]:
        """Asks again without what addresses the router, and compares."""
        if not self._passages(ticket.text):
            return decision, False
        share = self._rule_set.rules.steering.recheck_share
        # From the keyed digest: the same for a redelivery, another for the next ticket, and known to nobody outside.
        drawn = int(self._cache_key(ticket.tenant, f"recheck {ticket.id} {ticket.text}")[-8:], 16) / 2**32
        if drawn >= share:
            self._safe.on_checked(ticket, "unchecked")
            return decision, False
        left, asked = left_of(ticket.text, self._passages), False
        again: Decision | None = None
        if left.text and left.settled:
            outcome = await self._scores(self._primitive, self._cache_key, replace(ticket, text=left.text))
            asked = outcome.asked
            if isinstance(outcome.result, Reason):
                self._safe.on_checked(ticket, "unchecked")
                return vetoed(decision, self._rule_set, outcome.result), True
            again = decide(outcome.result, self._rule_set, self._calibration)
        verdict = still_routes(decision, again, self._rule_set, left)
        self._safe.on_checked(ticket, "agreed" if verdict is decision else "steered")
        return verdict, asked

    async def _answer(self, asked: Asked, ticket: Ticket) -> tuple[Answer, bool]:
        """The answer, and whether the engine was asked for it. What cannot be scored is unknown, and costs no more."""
        try:
            outcome = await self._scores(asked.primitive, asked.cache_key, ticket)
            if isinstance(outcome.result, Reason):
                return unanswered(asked.question, outcome.result), outcome.asked
            floor = self._rule_set.rules.gates.min_label_mass
            answer = read_answer(asked.question, outcome.result, asked.calibration, floor, cached=outcome.cached)
        except Exception as error:  # noqa: BLE001 - a bug must cost this answer, never the ticket
            return unanswered(asked.question, reason("internal_error", detail=type(error).__name__)), True
        return answer, outcome.asked

    async def _scores(
        self, primitive: Primitive, cache_key: Callable[[str | None, str], str], ticket: Ticket
    ) -> Outcome:
        return await self._asker.scores(
            primitive, cache_key(ticket.tenant, ticket.text), ticket.text, lambda: bool(self._passages(ticket.text))
        )


async def route_all(router: Router, tickets: Sequence[Ticket], at_once: int) -> tuple[Routed, ...]:
    """Every ticket's decision, in their order; at most `at_once` are asked about at a time."""
    slots = asyncio.Semaphore(at_once)

    async def route(ticket: Ticket) -> Routed:
        async with slots:
            return await router.route(ticket)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(route(ticket)) for ticket in tickets]
    return tuple(task.result() for task in tasks)
