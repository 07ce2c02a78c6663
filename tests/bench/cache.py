"""Part (d): what a look-up in Redis costs, one by one and as the worker makes it, through the worker's own adapter."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from worker.adapters.redis_cache import RedisCache
from worker.core.scores import LabelScores
from worker.runtime.cache_batch import CacheBatch

TOGETHER = 32
SCORES = LabelScores.from_logprobs((-0.2, -2.5, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0))


@dataclass(frozen=True, slots=True)
class LookUp:
    """One way to look scores up: CPU microseconds of this process for each."""

    name: str
    cpu_us: float


async def run(redis_url: str, rounds: int) -> list[LookUp]:
    """Every key is there, but for the last way. The first is what a worker without batches would do."""
    cache = RedisCache(
        redis_url, secret=b"a secret for benchmarks", owner=b"bench", ttl_s=600, timeout_s=5.0, clock=time.monotonic
    )
    keys = [f"{number:040x}" for number in range(TOGETHER)]
    new = (f"{number:040x}" for number in itertools.count(time.time_ns()))  # none of an earlier run's
    joined = CacheBatch(cache)
    try:
        await cache.put_many(dict.fromkeys(keys, SCORES))

        async def one_by_one() -> None:
            for key in keys:
                await cache.get_many([key])

        async def side_by_side() -> None:
            await asyncio.gather(*(cache.get_many([key]) for key in keys))

        async def together() -> None:
            await cache.get_many(keys)

        async def as_the_worker() -> None:
            found = await asyncio.gather(*(joined.get(key) for key in keys))
            assert None not in found

        async def of_new_tickets() -> None:
            missing = list(itertools.islice(new, TOGETHER))
            found = await asyncio.gather(*(joined.get(key) for key in missing))
            assert found.count(None) == TOGETHER
            for key in missing:
                joined.put(key, SCORES)

        ways: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("a GET for each ticket, one after the other", one_by_one),
            (f"a GET for each ticket, {TOGETHER} at once", side_by_side),
            (f"one MGET for {TOGETHER}", together),
            (f"the worker's look-ups, {TOGETHER} tickets at once", as_the_worker),
            (f"{TOGETHER} new tickets: looked up, then put", of_new_tickets),
        ]
        return [LookUp(name, await _cost_us(way, rounds)) for name, way in ways]
    finally:
        await joined.aclose()
        await cache.aclose()


async def _cost_us(way: Callable[[], Awaitable[None]], rounds: int) -> float:
    await way()
    began = time.process_time()
    for _ in range(rounds):
        await way()
    return (time.process_time() - began) / (rounds * TOGETHER) * 1e6
