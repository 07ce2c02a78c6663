"""Asker: one question about one ticket to scores, or to the reason why there are none; cache, retries, patience."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from worker.core.budget import Fitted
from worker.core.cache_key import cacheable
from worker.core.envelope import Reason
from worker.core.per_ticket import per_ticket
from worker.core.policy import reason
from worker.core.primitives import Plan, Primitive
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import (
    EngineDropped,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
    TooLong,
)
from worker.runtime.batcher import Batcher, OutOfTime
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.endpoints import EnginePool
from worker.runtime.limiter import RetryBudget
from worker.runtime.reading import Reader
from worker.telemetry import Attribute, SpanName, step

HANGS = 2
"""So often the engine may hang while it is asked about a ticket: in company, then in a call of its own; the third call
has nothing beside it, and a ticket at fault is found out."""


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


@per_ticket
class Outcome:
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


class Asker:
    """Asks until there is an answer or a reason to give up. One for all questions of a worker."""

    def __init__(
        self,
        *,
        cache: CacheBatch,
        batcher: Batcher,
        pool: EnginePool,
        budget: RetryBudget,
        patience: Patience,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        jitter: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._batcher = batcher
        self._pool = pool
        self._budget = budget
        self._patience = patience
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter

    async def scores(self, primitive: Primitive, key: str, text: str, is_flagged: Callable[[], bool]) -> Outcome:
        """From the cache, or from the engine by the primitive's plan; then `cacheable` says whether they are kept.

        `is_flagged`: whether something in the text addresses the router; asked where scores are new."""
        kept = False
        with step(SpanName.CACHE) as looking:
            scores = await self._cache.get(key)
            looking.set(Attribute.CACHED, scores is not None)
        if scores is not None and len(scores.logprobs) == len(primitive.labels.words):
            return Outcome(scores, cached=True, asked=False)
        try:
            with step(SpanName.SCORE):
                scores = await self._follow(primitive.plan(text))
            if cacheable(scores, flagged=is_flagged()):
                self._cache.put(key, scores)
                kept = True
            return Outcome(scores)
        except _GivenUp as gone:
            return Outcome(gone.why)
        except RequestRefused as error:  # by a tokenizer of this process: nobody was asked
            return Outcome(reason("engine_refused", detail=error), asked=False)
        finally:
            if not kept:
                self._cache.release(key)

    async def read(self, reader: Reader, text: str) -> Fitted | Reason:
        """What of the text is read, or why that is not known."""
        try:
            return await self._read(reader, text)
        except _GivenUp as gone:
            return gone.why

    async def _read(self, reader: Reader, text: str) -> Fitted:
        """Raises _GivenUp."""
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
            started, outages, proved = self._clock(), self._pool.outages, False
            try:
                scores = await self._batcher.score(request, left.seconds)
                left.seconds -= self._clock() - started
                return scores
            except OutOfTime as error:
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
                if isinstance(error, EngineSilent) and error.works is not None:
                    if (hung := hung + (not error.works)) > HANGS:
                        raise _GivenUp(reason("engine_timeout", deadline=f"{patience.deadline_s:g}")) from error
                    # A call to an engine that hung costs the ticket nothing, as while it is down; nor does a probe.
                    proved = error.works
                    started = min(self._clock(), started + (error.probed_s if proved else math.inf))
                failures += 1
                if failures >= patience.attempts and not await self._pool.suspect():
                    raise _GivenUp(reason("engine_unavailable", detail=error)) from error
                if not self._pool.is_up:
                    failures = 0  # the engine is down, which is not this ticket's fault: wait with all the others
                    continue
                retry_after_s = error.retry_after_s
            await self._sleep(self._backoff_s(failures + dropped, retry_after_s))
            # A retry after an outage is nobody's overload: it neither takes from the budget nor waits for it. Nor is
            # one beside which a probe was answered at once, as to neighbours of a ticket that never is.
            while (
                not proved
                and self._pool.outages == outages
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
