"""CacheBatch: joins the cache look-ups of tickets that come together, and waits where another worker scores already."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from worker.core.scores import LabelScores
from worker.ports import Lease, ScoreCache, SharedScoreCache


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a ticket waits for another worker's scores before it is scored here as well. Seconds."""

    lease_s: float = 2.0
    """What a worker that died costs those who wait for it. Scoring that takes longer is done twice."""
    longest_s: float = 2.0
    """Not above the latency that an engine is meant to have (Health.latency_target_s): asking it would take as long."""
    poll_s: float = 0.025
    vain_to_stop: int = 16
    """So many without scores among the last waits, and nobody waits for a while: leases then only cost time. A lease
    that was let go counts, too: whoever can write to Redis lets go of as many as they like, but scores they can't make.
    """
    of_last: int = 64
    stopped_s: float = 30.0


_Looking = list[asyncio.Future[LabelScores | None]]
"""Who waits for one key. Each has a future of its own, so that whoever is cancelled disturbs nobody: a shield around a
future that they share costs three times as much."""


class CacheBatch:
    """Look-ups made in one turn of the event loop share a round trip; writes are made behind the ticket's back.

    Equal keys are looked up once, whoever asks. Where the cache is shared, one worker at a time scores a key and the
    others wait for it; that fails open, too. At most `max_writes` writes wait; more are dropped, since a cache that
    can't keep up is only a slower cache.
    """

    def __init__(
        self,
        cache: ScoreCache,
        max_writes: int = 1024,
        *,
        waits: Waits | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cache = cache
        self._shared = cache if isinstance(cache, SharedScoreCache) else None
        self._max_writes = max_writes
        self._waits = waits or Waits()
        self._sleep = sleep
        self._looked_for: dict[str, _Looking] = {}
        self._queue: dict[str, _Looking] = {}
        """Of these, those that the next look-up takes along."""
        self._waiting: dict[str, float] = {}
        """Those that another worker scores, and the time until which they wait for it."""
        self._writes: dict[str, LabelScores] = {}
        self._releases: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = self._polling = False
        self._closed = False
        self._ends: deque[bool] = deque(maxlen=self._waits.of_last)
        """Of the last waits, which ended without scores."""
        self._stopped_until = float("-inf")
        self.counters: dict[str, int] = dict.fromkeys(("waits", "answered", "takeovers", "in_vain"), 0)
        """Keys that another worker was scoring, and how each wait ended."""

    async def get(self, key: str) -> LabelScores | None:
        """None is a miss: score it, then `put` or `release` the key. Never raises."""
        written = self._writes.get(key)
        if written is not None:
            return written
        loop = asyncio.get_running_loop()
        future: asyncio.Future[LabelScores | None] = loop.create_future()
        looking = self._looked_for.get(key)
        if looking is not None:
            looking.append(future)
        else:
            if not self._queue:
                loop.call_soon(self._start, self._read)
            self._looked_for[key] = self._queue[key] = [future]
        return await future

    def put(self, key: str, scores: LabelScores) -> None:
        """Best effort, not waited for."""
        self._settle(key, scores)
        if len(self._writes) >= self._max_writes:
            return
        self._writes[key] = scores
        self._write_soon()

    def release(self, key: str) -> None:
        """There will be no scores to put: whoever waits for them needs to know."""
        if self._shared is None or len(self._releases) >= self._max_writes:
            return
        self._releases.add(key)
        self._write_soon()

    async def aclose(self) -> None:
        """Let pending writes end (the cache's own deadline bounds them)."""
        self._closed = True
        for key in tuple(self._waiting):
            self._settle(key, None)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Callable[[], object]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work())  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _settle(self, key: str, scores: LabelScores | None) -> None:
        self._waiting.pop(key, None)
        for future in self._looked_for.pop(key, ()):
            if not future.done():
                future.set_result(scores)

    async def _read(self) -> None:
        asked, self._queue = self._queue, {}
        keys = list(asked)
        try:
            if self._shared is None:
                answers: Sequence[LabelScores | Lease | None] = await self._cache.get_many(keys)
            else:
                answers = await self._shared.get_or_lease(keys, self._waits.lease_s)
            for (key, looking), answer in zip(asked.items(), answers, strict=True):
                if self._looked_for.get(key) is not looking:
                    continue  # put meanwhile
                if answer is Lease.THEIRS and self._may_wait():
                    self._wait(key)
                else:
                    self._settle(key, answer if isinstance(answer, LabelScores) else None)
        except BaseException:
            for key, looking in asked.items():
                # Whatever went wrong in there, a ticket never waits for its cache.
                if self._looked_for.get(key) is looking and key not in self._waiting:
                    self._settle(key, None)
            raise

    # -- waiting for another worker --------------------------------------------------------------------------------

    def _may_wait(self) -> bool:
        if self._closed or asyncio.get_running_loop().time() < self._stopped_until:
            return False
        return not self._waiting or not self._is_vain()  # one at a time, until most of them get scores again

    def _is_vain(self) -> bool:
        return sum(self._ends) >= self._waits.vain_to_stop

    def _wait(self, key: str) -> None:
        self.counters["waits"] += 1
        if not self._polling:
            self._polling = True
            self._start(self._poll)
        self._waiting[key] = asyncio.get_running_loop().time() + self._waits.longest_s

    async def _poll(self) -> None:
        """Asks for all keys together until each has scores, a free lease, or waited long enough."""
        try:
            while self._waiting:
                await self._sleep(self._waits.poll_s)
                await self._ask_again()
        finally:
            self._polling = False
            for key in tuple(self._waiting):
                self._settle(key, None)

    async def _ask_again(self) -> None:
        keys = list(self._waiting)
        if self._shared is None or not keys:
            return
        answers = await self._shared.get_or_lease(keys, self._waits.lease_s)
        now = asyncio.get_running_loop().time()
        for key, answer in zip(keys, answers, strict=True):
            until = self._waiting.get(key)
            if until is None or (answer is Lease.THEIRS and now < until):
                continue
            if isinstance(answer, LabelScores):
                self._ended("answered", key, answer)
            else:
                self._ended("takeovers" if answer is Lease.OURS else "in_vain", key, None)

    def _ended(self, how: str, key: str, scores: LabelScores | None) -> None:
        self.counters[how] += 1
        self._ends.append(scores is None)
        if scores is None and self._is_vain():
            self._stopped_until = asyncio.get_running_loop().time() + self._waits.stopped_s
        self._settle(key, scores)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_soon(self) -> None:
        if not self._writing:
            self._writing = True
            self._start(self._write)

    async def _write(self) -> None:
        try:
            while self._writes or self._releases:
                writes, releases = self._writes, list(self._releases)
                self._writes, self._releases = {}, set()
                if self._shared is None:
                    await self._cache.put_many(writes)
                else:
                    await self._shared.put_many(writes, releases)
        finally:
            self._writing = False
