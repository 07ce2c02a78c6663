"""Everything between a ticket and its decision in virtual time, over engines that fail by a plan."""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.core.sets import artefact, rule_set
from tests.runtime.engines import IDENTITY, ScriptedEngine
from worker.adapters.memory import MemoryCache
from worker.core.labels import Labels
from worker.core.policy import Calibration
from worker.core.primitives import ChooseOne
from worker.core.prompt import Prompt
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.ticket import Ticket
from worker.errors import EngineUnavailable
from worker.runtime.asking import Asker, Patience
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.canary import Canaries, Canary, find_canaries
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.limiter import RetryBudget
from worker.runtime.router import Routed, Router

RULES = rule_set()
PRIMITIVE = ChooseOne(Prompt("p", "\n:"), Labels(("a", "b", "c"), (1, 2, 3)))
CATEGORIES = ("billing", "login", "bug")


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class PlannedEngine(ScriptedEngine):
    """Answers from the text; how long it takes and what goes wrong is said by functions of the time."""

    seed: int = 0
    latency_s: Callable[[float, int], float] = lambda at, in_flight: 0.02
    """Of (time, calls in flight with this one)."""
    fails: Callable[[float], float] = lambda at: 0.0
    """Chance that a call ends as unavailable."""
    mixes: Callable[[float], float] = lambda at: 0.0
    """Chance that the rows of a call come in another order."""
    in_flight: int = 0
    tickets: int = 0
    failed: int = 0
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """(when the call began, what it took), of answered calls."""

    def __post_init__(self) -> None:
        super().__init__()
        self.chance = random.Random(self.seed)

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        began = now()
        self.in_flight += 1
        self.tickets += len(requests)
        try:
            await asyncio.sleep(self.latency_s(began, self.in_flight))
            if self.chance.random() < self.fails(now()):
                self.failed += 1
                raise EngineUnavailable("planned")
            await super().score(requests)
            rows = [_scores(request) for request in requests]
        finally:
            self.in_flight -= 1
        if self.chance.random() < self.mixes(now()):
            self.chance.shuffle(rows)
        self.latencies.append((began, now() - began))
        return rows


def _scores(request: ScoreRequest) -> LabelScores:
    """The label that the text names, surely or less surely: rows of different tickets differ."""
    item = str(request.item)
    _, _, rest = item.partition("label ")
    chosen = int(rest[0]) if rest[:1].isdigit() else 0
    high = 0.6 + 0.39 * zlib.crc32(item.encode()) / 2**32
    return LabelScores.from_logprobs(tuple(math.log(high if n == chosen else (1 - high) / 2) for n in range(3)))


class Simulated:
    """A router over these engines; what the pool reports is kept, with its time."""

    def __init__(
        self,
        *engines: PlannedEngine,
        seed: int = 0,
        health: Health | None = None,
        patience: Patience | None = None,
        batch_items: int = 8,
        batch_wait_s: float = 0.005,
        concurrency: int = 16,
    ) -> None:
        self.chance = random.Random(seed)
        self.changes: list[tuple[float, str, bool]] = []
        self.checks: Counter[bool] = Counter()
        self.alarms: list[tuple[float, str | None]] = []
        self.outcomes: Counter[str] = Counter()
        self.ends: dict[int, tuple[float, Routed]] = {}
        """Ticket to (when it was decided, how)."""
        self.pool = EnginePool(
            [(f"e{n}", engine) for n, engine in enumerate(engines)],
            PRIMITIVE.request("probe"),
            IDENTITY,
            health or Health(),
            clock=now,
            sleep=asyncio.sleep,
            on_change=lambda name, up, _: self.changes.append((now(), name, up)),
            on_call=lambda outcome, _: self.outcomes.update([outcome]),
            on_rows=self._checked,
        )
        self.batcher = Batcher(
            self.pool.score, batch_items, batch_wait_s, concurrency * len(engines), ask_alone=self.pool.score_alone
        )
        self.router = Router(
            rule_set=RULES,
            primitive=PRIMITIVE,
            calibration=Calibration(artefact(RULES)),
            asker=Asker(
                cache=CacheBatch(MemoryCache()),
                batcher=self.batcher,
                pool=self.pool,
                budget=RetryBudget(now),
                patience=patience or Patience(),
                clock=now,
                sleep=asyncio.sleep,
                jitter=self.chance.random,
            ),
            clock=now,
            cache_key=lambda tenant, text: text,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.pool.start()
        try:
            yield
        finally:
            await self.batcher.aclose()
            await self.pool.aclose()

    async def watch_rows(self, engine: PlannedEngine) -> tuple[Canary, ...]:
        known = await find_canaries(PRIMITIVE, ["label 0 known", "label 1 known", "label 2 known"], engine)
        self.pool.watch_rows(Canaries(known, self.chance.random))
        return known

    async def send(self, numbers: Sequence[int], per_second: float, most: int = 256) -> None:
        """These tickets at this rate, at most so many in flight as in a worker; ends when all are decided."""
        room = asyncio.Semaphore(most)
        tasks = []
        for number in numbers:
            await room.acquire()
            tasks.append(asyncio.create_task(self._one(number, room)))
            await asyncio.sleep(self.chance.expovariate(per_second))
        await asyncio.gather(*tasks)

    def wrong(self) -> list[int]:
        """Tickets that were routed to another category than their text names."""
        return [
            number
            for number, (_, routed) in self.ends.items()
            if routed.decision.action == "route" and routed.decision.category != CATEGORIES[number % 3]
        ]

    def codes(self) -> Counter[str]:
        return Counter(routed.decision.reasons[0].code for _, routed in self.ends.values())

    async def _one(self, number: int, room: asyncio.Semaphore) -> None:
        routed = await self.router.route(Ticket(id=str(number), text=f"label {number % 3} {number}"))
        self.ends[number] = now(), routed
        room.release()

    def _checked(self, endpoint: str, in_order: bool, alarm: str | None) -> None:
        self.checks[in_order] += 1
        if not self.alarms or self.alarms[-1][1] != alarm:
            self.alarms.append((now(), alarm))
