"""Router: one ticket to one decision; cache, score, retry, decide."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from worker.core.envelope import Reason
from worker.core.policy import (
    Calibration,
    Decision,
    NoCalibration,
    decide,
    decide_override,
    escalate_unscored,
    reason,
)
from worker.core.primitives import ChooseOne
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.ticket import Ticket
from worker.errors import (
    EngineDropped,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
    TooLong,
)
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.endpoints import EnginePool
from worker.runtime.limiter import RetryBudget


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
        primitive: ChooseOne,
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
    ) -> None:
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

    async def route(self, ticket: Ticket) -> Routed:
        """Never raises but for cancellation and bugs."""
        override = decide_override(ticket, self._rule_set)
        if override is not None:
            return Routed(override)
        key = self._cache_key(ticket.tenant, ticket.text)
        scores = await self._cache.get(key)
        if scores is not None and len(scores.logprobs) == len(self._primitive.labels.words):
            return Routed(decide(scores, self._rule_set, self._calibration), cached=True)
        started = self._clock()
        try:
            scores = await self._score(self._primitive.request(ticket.text))
        except _GivenUp as gone:
            return Routed(escalate_unscored(self._rule_set, gone.why), score_s=self._clock() - started)
        self._cache.put(key, scores)
        return Routed(decide(scores, self._rule_set, self._calibration), score_s=self._clock() - started)

    async def _score(self, request: ScoreRequest) -> LabelScores:
        """Ask until there is an answer, or a reason to give up. Raises _GivenUp."""
        patience = self._patience
        left_s = patience.deadline_s
        failures = dropped = 0
        self._budget.first_attempt()
        while True:
            await self._until_engine_is_up()
            started, outages = self._clock(), self._pool.outages
            try:
                async with asyncio.timeout(left_s) as deadline:
                    return await self._batcher.score(request)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise _GivenUp(reason("engine_timeout", deadline=f"{patience.deadline_s:g}")) from error
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
                self._pool.outages == outages and (wait_s := self._budget.wait_s()) and left_s > self._clock() - started
            ):
                await self._sleep(min(wait_s, left_s))
            left_s -= self._clock() - started
            if left_s <= 0:
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
