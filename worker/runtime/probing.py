"""Probe: whether one engine scores; one request at a time, for which nobody waits as long as for a ticket's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context

from worker.core.scores import ScoreRequest
from worker.errors import EngineSilent
from worker.ports import ScoringEngine
from worker.runtime.canary import RowWatch

TIMES_SLOWER = 3.0
"""A probe may take so many times what the engine's calls took lately: beside them it waits for its turn as they did."""
FADING = 0.9
"""What a call took counts so much less with each one after it."""


class Probe:
    """One short request. An engine that hangs is told from one that works within `least_s` where calls take less than a
    third of that, so that no ticket waits for it as long as for an answer.

    Who does not wait any longer leaves the request at the engine, until the adapter's own limit, and who asks meanwhile
    joins it: many an engine computes to the end what nobody waits for, so that one that is slow would be asked more and
    more. A late answer proves that it works, and says how long the next probe may take.
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
        self._task: asyncio.Task[None] | None = None
        self._is_proof = False
        """Whether what is outstanding holds the known tickets."""

    @property
    def is_outstanding(self) -> bool:
        """Whether the engine has not answered one yet."""
        return self._task is not None and not self._task.done()

    def answered(self, taken_s: float) -> None:
        """A call or a probe was."""
        self._deadline_s = max(self._least_s, TIMES_SLOWER * taken_s, FADING * self._deadline_s)

    async def scores_soon(self) -> None:
        """As `scores`; EngineSilent where there is no answer in the short time."""
        deadline_s = self._deadline_s
        task = self._outstanding()
        await asyncio.wait({task}, timeout=deadline_s)
        if not task.done():
            raise EngineSilent(f"no answer to a probe within {deadline_s:g} s")
        task.result()

    async def scores(self) -> None:
        """Raises RouterError where it does not, within what the adapter allows for a call."""
        await asyncio.shield(self._outstanding())

    async def proves(self) -> None:
        """As `scores`, with the known tickets where there are any. Raises MixedUp too."""
        if self._rows.canaries is None:
            await self.scores()
            return
        while self.is_outstanding and not self._is_proof:
            await self.scores()
        await asyncio.shield(self._outstanding(prove=True))

    async def aclose(self) -> None:
        """Gives up what is outstanding."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _outstanding(self, *, prove: bool = False) -> asyncio.Task[None]:
        if self._task is None or self._task.done():
            self._is_proof = prove
            self._task = asyncio.create_task(self._ask(), context=Context())  # about no ticket that happens to wait
            self._task.add_done_callback(_seen)
        return self._task

    async def _ask(self) -> None:
        started = self._clock()
        if self._is_proof:
            await self._rows.check()
        else:
            await self._engine.score([self._request])
        self.answered(self._clock() - started)


def _seen(task: asyncio.Task[None]) -> None:
    """Its failure is nobody's concern where nobody waits any longer."""
    if not task.cancelled():
        task.exception()
