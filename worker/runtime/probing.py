"""Probe: whether one engine scores, found out under a deadline of its own, which is much shorter than a ticket's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from worker.core.scores import ScoreRequest
from worker.errors import EngineSilent
from worker.ports import ScoringEngine
from worker.runtime.canary import RowWatch

TIMES_SLOWER = 3.0
"""A probe may take so many times what the engine's calls took lately: beside them it waits for its turn as they did."""
GROWTH = 1.5
FADING = 0.9
"""What a call took counts so much less with each one after it."""


class Probe:
    """One short request. An engine that hangs is told from one that works within `least_s` where calls take less than a
    third of that, so that no ticket waits for it as long as for an answer.

    One that turned so slow that it cannot answer in time is given half as much again with each probe, else it would
    never be found to work; what the adapter itself allows for a call is the most. So the last probe before an engine is
    back takes no more than a third of the time that it was away.
    """

    def __init__(
        self, engine: ScoringEngine, rows: RowWatch, request: ScoreRequest, clock: Callable[[], float], least_s: float
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._request = request
        self._clock = clock
        self._least_s = least_s
        self._deadline_s = least_s

    def answered(self, taken_s: float) -> None:
        """A call or a probe was."""
        self._deadline_s = max(self._least_s, TIMES_SLOWER * taken_s, FADING * self._deadline_s)

    async def scores(self) -> None:
        """Raises RouterError where it does not; EngineSilent where it did not in time."""
        await self._in_time(self._score)

    async def proves(self) -> None:
        """As `scores`, with the known tickets where there are any. Raises MixedUp too."""
        await self._in_time(self._score if self._rows.canaries is None else self._rows.check)

    async def _score(self) -> None:
        await self._engine.score([self._request])

    async def _in_time(self, ask: Callable[[], Awaitable[None]]) -> None:
        started, deadline_s = self._clock(), self._deadline_s
        try:
            async with asyncio.timeout(deadline_s) as limit:
                await ask()
        except TimeoutError:
            if not limit.expired():
                raise
            self._deadline_s = max(self._deadline_s, GROWTH * deadline_s)
            raise EngineSilent(f"no answer to a probe within {deadline_s:g} s") from None
        self.answered(self._clock() - started)
