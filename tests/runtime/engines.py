"""A scoring engine in memory that answers from the text, and fails by a script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from worker.core.scores import LabelScores, ScoreRequest
from worker.ports import EngineIdentity

IDENTITY = EngineIdentity("scripted", "m", "t", 1000)

Script = Callable[[Sequence[ScoreRequest]], None]
"""Raises what this call shall raise."""


class ScriptedEngine:
    """The label whose index stands behind `label ` in the item gets probability .9; remembers what it was asked."""

    def __init__(self, script: Script | None = None, delay_s: float = 0.0) -> None:
        self.calls: list[list[str]] = []
        self.script = script
        self.delay_s = delay_s
        self.identified = IDENTITY

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        self.calls.append([r.item for r in requests])
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.script is not None:
            self.script(requests)
        return [_scores(r) for r in requests]

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        vocabulary: dict[str, int] = {}
        return [[vocabulary.setdefault(w, len(vocabulary)) for w in text.split(" ")] for text in texts]

    async def identity(self) -> EngineIdentity:
        return self.identified

    async def probe(self) -> None: ...

    async def aclose(self) -> None: ...


def _scores(request: ScoreRequest) -> LabelScores:
    size = len(request.label_token_ids)
    _, _, rest = request.item.partition("label ")
    chosen = int(rest[0]) if rest[:1].isdigit() else 0
    low = 0.05 / (size - 1)
    return LabelScores.from_logprobs(tuple(math.log(0.9 if n == chosen else low) for n in range(size)))
