"""CacheBatch: joins the cache look-ups of tickets that arrive together into one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker.core.scores import LabelScores
from worker.ports import ScoreCache


class CacheBatch:
    """Look-ups made in one turn of the event loop share an MGET; writes are made behind the ticket's back.

    At most `max_writes` writes wait; more are dropped, since a cache that can't keep up is only a slower cache.
    """

    def __init__(self, cache: ScoreCache, max_writes: int = 1024) -> None:
        self._cache = cache
        self._max_writes = max_writes
        self._reads: dict[str, asyncio.Future[LabelScores | None]] = {}
        self._writes: dict[str, LabelScores] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = False

    async def get(self, key: str) -> LabelScores | None:
        """None is a miss. Never raises."""
        future = self._reads.get(key)
        if future is None:
            if not self._reads:
                asyncio.get_running_loop().call_soon(self._start, self._read)
            future = self._reads[key] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(future)

    def put(self, key: str, scores: LabelScores) -> None:
        """Best effort, not waited for."""
        if len(self._writes) >= self._max_writes:
            return
        self._writes[key] = scores
        if not self._writing:
            self._writing = True
            self._start(self._write)

    async def aclose(self) -> None:
        """Let pending writes end (the cache's own deadline bounds them)."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Callable[[], object]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work())  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        reads, self._reads = self._reads, {}
        try:
            for future, scores in zip(reads.values(), await self._cache.get_many(list(reads)), strict=True):
                future.set_result(scores)
        finally:
            for future in reads.values():  # whatever went wrong in there, a ticket never waits for its cache
                if not future.done():
                    future.set_result(None)

    async def _write(self) -> None:
        try:
            while self._writes:
                writes, self._writes = self._writes, {}
                await self._cache.put_many(writes)
        finally:
            self._writing = False
