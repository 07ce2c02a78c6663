"""Load: the same work so many at a time, and how long each piece of it took."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class Timed(Generic[Done]):
    """What came of one piece; `seconds` count from when it was begun, not while it waited for its turn."""

    done: Done
    seconds: float


async def under_load(
    work: Sequence[Callable[[], Awaitable[Done]]],
    at_once: int,
    clock: Callable[[], float],
    progress: Callable[[int, int], None],
) -> list[Timed[Done]]:
    """Every piece in its order, `at_once` at a time until they run out. Raises what the first that fails raises, after
    the others were cancelled.
    """
    slots = asyncio.Semaphore(at_once)
    finished = 0

    async def one(piece: Callable[[], Awaitable[Done]]) -> Timed[Done]:
        nonlocal finished
        async with slots:
            began = clock()
            done = await piece()
            seconds = clock() - began
        finished += 1
        progress(finished, len(work))
        return Timed(done, seconds)

    tasks = [asyncio.create_task(one(piece)) for piece in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
