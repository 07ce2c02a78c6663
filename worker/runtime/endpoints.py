"""EngineGate: whether the engine may be asked just now, and what happens while it may not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from worker.errors import EngineError, RouterError

Probe = Callable[[], Awaitable[None]]
"""Scores something small, so that what is proved is scoring; raises EngineError where that fails."""


class EngineGate:
    """A circuit breaker that is closed again by a scoring probe, never by a customer's ticket.

    Opens after `failures_to_open` consecutive failures, or at once when `suspect` finds that the probe fails too.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        failures_to_open: int,
        probe_interval_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        on_change: Callable[[bool, str], None],
    ) -> None:
        self._probe = probe
        self._failures_to_open = failures_to_open
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._sleep = sleep
        self._on_change = on_change
        self._up = asyncio.Event()
        self._up.set()
        self._failures = 0
        self._suspicion: asyncio.Task[bool] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.down_since: float | None = None
        self.trouble: str | None = None
        """What the engine said last, while it is down."""

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    async def wait_until_up(self) -> None:
        """Returns at once while the gate is closed to failures, else when a probe has succeeded."""
        await self._up.wait()

    def succeeded(self) -> None:
        """A request was answered."""
        self._failures = 0

    def failed(self, why: str) -> None:
        """A request met an unavailable engine."""
        self._failures += 1
        if self._failures >= self._failures_to_open:
            self._open(why)

    async def suspect(self) -> bool:
        """Probe now (once for all who ask): is the engine itself at fault? True opens the gate."""
        if not self.is_up:
            return True
        if self._suspicion is None or self._suspicion.done():
            self._suspicion = asyncio.create_task(self._probe_fails())
        return await asyncio.shield(self._suspicion)

    async def aclose(self) -> None:
        tasks = [task for task in (self._suspicion, self._watch) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_fails(self) -> bool:
        try:
            await self._probe()
        except EngineError as error:
            self._open(str(error))
            return True
        return False

    def _open(self, why: str) -> None:
        self.trouble = why
        if not self.is_up:
            return
        self._up.clear()
        self.down_since = self._clock()
        self._on_change(False, why)
        self._watch = asyncio.create_task(self._until_up())

    async def _until_up(self) -> None:
        while True:
            await self._sleep(self._probe_interval_s)
            try:
                await self._probe()
            except RouterError as error:
                self.trouble = str(error)
                continue
            self._failures = 0
            self.down_since = self.trouble = None
            self._up.set()
            self._on_change(True, "a scoring probe succeeded")
            return
