"""Router: one ticket to one decision; cache, score, retry, decide."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from worker.core.answers import raise_by_answers, read_answer, unanswered
from worker.core.budget import Fitted
from worker.core.cache_key import cacheable
from worker.core.envelope import Answer, Reason
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
from worker.core.primitives import Plan, Primitive
from worker.core.questions import FurtherQuestion
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.steering import Checked, still_routes
from worker.core.suspicion import Flagger, Passage, without
from worker.core.ticket import Ticket
from worker.errors import (
    EngineDropped,
    EngineError,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
    TooLong,
)
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.endpoints import EnginePool
from worker.runtime.limiter import RetryBudget
from worker.runtime.quota import TenantQuota
from worker.runtime.reading import Reader

LOOKED_AT = 256
"""Texts whose passages are remembered."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long and how often the engine is asked about one ticket. Seconds."""

    attempts: int = 3
    deadline_s: float = 60.0
    """Time a ticket may spend being asked about; stands still while the engine is down."""
    first_backoff_s: float = 0.2
    longest_backoff_s: float = 10.0
    on_engine_down: Literal["wait", "escalate"] = "wait"
    max_wait_s: float = 600.0
    """Only with `escalate`: how long a ticket waits for an engine that is down."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A decision, with what it took."""

    decision: Decision
    cached: bool = False
    score_s: float | None = None
    """Waiting for the batch and the engine; None where it was not asked."""


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


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Scores, or why there are none; `asked` where the engine was."""

    result: LabelScores | Reason
    cached: bool = False
    asked: bool = True


@dataclass(slots=True)
class _TimeLeft:
    """What is left of one question's time about one ticket; all requests of its plan share it."""

    seconds: float


class _GivenUp(Exception):
    """No scores; the reason is for people."""

    def __init__(self, why: Reason) -> None:
        super().__init__(why.code)
        self.why = why


class Router:
    """Asks about one ticket and decides. Every ticket gets a decision: failing to score it is one."""

    def __init__(
        self,
        *,
        rule_set: RuleSet,
        primitive: Primitive,
        calibration: Calibration | NoCalibration,
        cache: CacheBatch,
        cache_key: Callable[[str | None, str], str],
        batcher: Batcher,
        pool: EnginePool,
        budget: RetryBudget,
        patience: Patience,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        jitter: Callable[[], float],
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
        self._cache = cache
        self._cache_key = cache_key
        self._batcher = batcher
        self._pool = pool
        self._budget = budget
        self._patience = patience
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._further = tuple(further)

    async def route(self, ticket: Ticket) -> Routed:
        """Never raises but for cancellation and bugs."""
        return self.without_asking(ticket) or await self.ask(ticket)

    def without_asking(self, ticket: Ticket) -> Routed | None:
        """What a rule says of the ticket by itself; None where it has to be asked about."""
        override = decide_override(ticket, self._rule_set)
        return Routed(override) if override is not None else None

    async def ask(self, ticket: Ticket) -> Routed:
        """A ticket that no override decides. Never raises but for cancellation and bugs."""
        if ticket.shortened is not None:  # overrides read the whole ticket, everything from here on what is scored
            ticket = replace(ticket, text=ticket.shortened, shortened=None)
        quota = self._safe.quota
        if quota is not None and not quota.admits(ticket.tenant, len(ticket.text)):
            return Routed(escalate_unscored(self._rule_set, reason("over_quota", characters=quota.characters)))
        started = self._clock()
        reader, cut = self._safe.reader, False
        if reader is not None and not reader.needs_no_cut(ticket.text):
            try:
                fitted = await self._read(reader, ticket.text)
            except _GivenUp as gone:
                return Routed(escalate_unscored(self._rule_set, gone.why))
            ticket, cut = replace(ticket, text=fitted.text) if fitted.cut else ticket, fitted.cut
        outcome, answers = await self._ask_everything(ticket)
        asked_again = False
        if isinstance(outcome.result, Reason):
            decision = escalate_unscored(self._rule_set, outcome.result)
        else:
            decision = decide(outcome.result, self._rule_set, self._calibration)
            if decision.action == "route" and not (cut and self._rule_set.rules.length.when_cut == "escalate"):
                decision, asked_again = await self._doubted(decision, ticket)
        if reader is not None and cut:
            decision = read_in_part(decision, self._rule_set, reader.budget.tokens)
        asked_any = outcome.asked or asked_again or any(asked for _, asked in answers)
        score_s = self._clock() - started if asked_any else None
        if self._further:
            decision = raise_by_answers(decision, [answer for answer, _ in answers], self._rule_set)
        return Routed(decision, cached=outcome.cached, score_s=score_s)

    async def _ask_everything(self, ticket: Ticket) -> tuple[_Outcome, list[tuple[Answer, bool]]]:
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
        passages = self._passages(ticket.text)
        if not passages:
            return decision, False
        share = self._rule_set.rules.steering.recheck_share
        # From the keyed digest: the same for a redelivery, another for the next ticket, and known to nobody outside.
        drawn = int(self._cache_key(ticket.tenant, f"recheck {ticket.id} {ticket.text}")[-8:], 16) / 2**32
        if drawn >= share:
            self._safe.on_checked(ticket, "unchecked")
            return decision, False
        left, asked = without(ticket.text, passages), False
        again: Decision | None = None
        if left:
            outcome = await self._scores(self._primitive, self._cache_key, replace(ticket, text=left))
            asked = outcome.asked
            if isinstance(outcome.result, Reason):
                self._safe.on_checked(ticket, "unchecked")
                return vetoed(decision, self._rule_set, outcome.result), True
            again = decide(outcome.result, self._rule_set, self._calibration)
        verdict = still_routes(decision, again, self._rule_set, passages)
        self._safe.on_checked(ticket, "agreed" if verdict is decision else "steered")
        return verdict, asked

    async def _read(self, reader: Reader, text: str) -> Fitted:
        """What of the text is read. Raises _GivenUp."""
        patience = self._patience
        failures = 0
        while True:
            await self._until_engine_is_up()
            try:
                async with asyncio.timeout(patience.deadline_s) as deadline:
                    return await reader.fit(text)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise _GivenUp(reason("engine_timeout", deadline=f"{patience.deadline_s:g}")) from error
            except TooLong as error:
                raise _GivenUp(reason("too_long", detail=error)) from error
            except RequestRefused as error:
                raise _GivenUp(reason("engine_refused", detail=error)) from error
            except EngineError as error:
                failures += 1
                if failures >= patience.attempts:
                    await self._pool.suspect()
                    if self._pool.is_up:
                        raise _GivenUp(reason("engine_unavailable", detail=error)) from error
                    failures = 0  # the engine is down: wait with all the others
            await self._sleep(self._backoff_s(max(1, failures), None))

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
    ) -> _Outcome:
        """From the cache, or from the engine by the primitive's plan; then `cacheable` says whether they are kept."""
        key, kept = cache_key(ticket.tenant, ticket.text), False
        scores = await self._cache.get(key)
        if scores is not None and len(scores.logprobs) == len(primitive.labels.words):
            return _Outcome(scores, cached=True, asked=False)
        try:
            scores = await self._follow(primitive.plan(ticket.text))
            if cacheable(scores, flagged=bool(self._passages(ticket.text))):
                self._cache.put(key, scores)
                kept = True
            return _Outcome(scores)
        except _GivenUp as gone:
            return _Outcome(gone.why)
        except RequestRefused as error:  # by a tokenizer of this process: nobody was asked
            return _Outcome(reason("engine_refused", detail=error), asked=False)
        finally:
            if not kept:
                self._cache.release(key)

    async def _follow(self, plan: Plan) -> LabelScores:
        """Round by round. Raises _GivenUp."""
        left = _TimeLeft(self._patience.deadline_s)
        requests = next(plan)
        while True:
            rows = [await self._score(request, left) for request in requests]
            try:
                requests = plan.send(rows)
            except StopIteration as end:
                scores: LabelScores = end.value
                return scores

    async def _score(self, request: ScoreRequest, left: _TimeLeft) -> LabelScores:
        """Ask until there is an answer, or a reason to give up. Raises _GivenUp."""
        patience = self._patience
        failures = dropped = hung = 0
        self._budget.first_attempt()
        while True:
            await self._until_engine_is_up()
            started, outages = self._clock(), self._pool.outages
            try:
                async with asyncio.timeout(left.seconds) as deadline:
                    scores = await self._batcher.score(request)
                left.seconds -= self._clock() - started
                return scores
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                # An engine that hangs is down, and where few calls wait for it only a probe finds that out by now. A
                # ticket that finds it hanging a second time may be the reason itself.
                hung += 1
                if hung > 1 or not await self._pool.suspect():
                    raise _GivenUp(reason("engine_timeout", deadline=f"{patience.deadline_s:g}")) from error
                continue
            except TooLong as error:
                raise _GivenUp(reason("too_long", detail=error)) from error
            except RequestRefused as error:
                raise _GivenUp(reason("engine_refused", detail=error)) from error
            except InvalidAnswer as error:
                failures += 1
                if failures >= patience.attempts:
                    raise _GivenUp(reason("invalid_answer", detail=error)) from error
                retry_after_s = None
            except EngineDropped as error:
                # Perhaps this ticket ends the engine: it gets one more try, never the engine's whole patience. That
                # try waits until the engine has proved to be alive, so that one death is not counted twice.
                dropped += 1
                if dropped > 1:
                    raise _GivenUp(reason("engine_dropped")) from error
                await self._pool.suspect()
                retry_after_s = None
            except EngineUnavailable as error:
                failures += 1
                if failures >= patience.attempts and not await self._pool.suspect():
                    raise _GivenUp(reason("engine_unavailable", detail=error)) from error
                if not self._pool.is_up:
                    failures = 0  # the engine is down, which is not this ticket's fault: wait with all the others
                    continue
                retry_after_s = error.retry_after_s
            await self._sleep(self._backoff_s(failures + dropped, retry_after_s))
            # A retry after an outage is nobody's overload: it neither takes from the budget nor waits for it.
            while (
                self._pool.outages == outages
                and (wait_s := self._budget.wait_s())
                and left.seconds > self._clock() - started
            ):
                await self._sleep(min(wait_s, left.seconds))
            left.seconds -= self._clock() - started
            if left.seconds <= 0:
                raise _GivenUp(reason("engine_timeout", deadline=f"{patience.deadline_s:g}"))

    async def _until_engine_is_up(self) -> None:
        if self._pool.is_up:
            return
        if self._patience.on_engine_down == "wait":
            await self._pool.wait_until_up()
            return
        try:
            async with asyncio.timeout(self._patience.max_wait_s) as limit:
                await self._pool.wait_until_up()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise _GivenUp(reason("engine_unavailable", detail=self._pool.trouble)) from error

    def _backoff_s(self, failures: int, retry_after_s: float | None) -> float:
        """Full jitter; an engine that names its own time is given it, up to the longest backoff."""
        patience = self._patience
        ceiling = min(patience.longest_backoff_s, patience.first_backoff_s * 2.0 ** (failures - 1))
        backoff_s = self._jitter() * ceiling
        if retry_after_s is not None:
            backoff_s += min(retry_after_s, patience.longest_backoff_s)
        return backoff_s


async def route_all(router: Router, tickets: Sequence[Ticket], at_once: int) -> tuple[Routed, ...]:
    """Every ticket's decision, in their order; at most `at_once` are asked about at a time."""
    slots = asyncio.Semaphore(at_once)

    async def route(ticket: Ticket) -> Routed:
        async with slots:
            return await router.route(ticket)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(route(ticket)) for ticket in tickets]
    return tuple(task.result() for task in tasks)
