"""Two tiers: a bounded memory of this process in front of a cache that all workers share.

Nothing has to be kept coherent: what stands under a key is what any engine under the same fingerprints says, whoever
put it there and when.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from worker.core.scores import LabelScores
from worker.ports import Lease, ScoreCache, SharedScoreCache

Answer = TypeVar("Answer", LabelScores | None, LabelScores | Lease | None)


class TieredCache:
    """`SharedScoreCache` that asks `far` only for what `near` has not, and puts there what it finds.

    Who closes it closes both.
    """

    def __init__(self, near: ScoreCache, far: SharedScoreCache) -> None:
        self.near = near
        self.far = far

    async def get_many(self, keys: Sequence[str]) -> Sequence[LabelScores | None]:
        return await self._look(keys, self.far.get_many)

    async def get_or_lease(self, keys: Sequence[str], lease_s: float) -> Sequence[LabelScores | Lease | None]:
        return await self._look(keys, lambda missing: self.far.get_or_lease(missing, lease_s))

    async def put_many(self, items: Mapping[str, LabelScores], released: Sequence[str] = ()) -> None:
        await self.near.put_many(items)
        await self.far.put_many(items, released)

    async def probe(self) -> str | None:
        return await self.far.probe()

    async def aclose(self) -> None:
        await self.near.aclose()
        await self.far.aclose()

    async def _look(
        self, keys: Sequence[str], ask: Callable[[Sequence[str]], Awaitable[Sequence[Answer]]]
    ) -> list[Answer]:
        found: list[Answer] = list(await self.near.get_many(keys))
        places = [place for place, scores in enumerate(found) if scores is None]
        if not places:
            return found
        fresh: dict[str, LabelScores] = {}
        for place, answer in zip(places, await ask([keys[place] for place in places]), strict=True):
            found[place] = answer
            if isinstance(answer, LabelScores):
                fresh[keys[place]] = answer
        if fresh:
            await self.near.put_many(fresh)
        return found
