"""Router: every ticket gets a decision, whatever the engine and the cache do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import pytest

from tests.core.sets import artefact, rule_set
from tests.runtime.engines import IDENTITY, ScriptedEngine
from tests.runtime.virtual_time import in_virtual_time
from worker.core.labels import Labels
from worker.core.policy import Calibration
from worker.core.primitives import ChooseOne
from worker.core.prompt import Prompt
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.ticket import Ticket
from worker.errors import EngineDropped, EngineUnavailable, InvalidAnswer, RequestRefused, TooLong
from worker.runtime.asking import Asker, Patience
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.limiter import RetryBudget
from worker.runtime.router import Routed, Router

RULES = rule_set()


class Cache:
    """In memory; counts round trips."""

    def __init__(self) -> None:
        self.held: dict[str, LabelScores] = {}
        self.reads: list[int] = []

    async def get_many(self, keys: Sequence[str]) -> Sequence[LabelScores | None]:
        self.reads.append(len(keys))
        return [self.held.get(key) for key in keys]

    async def put_many(self, items: Mapping[str, LabelScores]) -> None:
        self.held.update(items)

    async def probe(self) -> str | None:
        return None

    async def aclose(self) -> None: ...


class Bench:
    """A router over a scripted engine, with sleeps that are counted and take no time."""

    def __init__(self, engine: ScriptedEngine, **patience: object) -> None:
        self.slept: list[float] = []
        self.changes: list[bool] = []
        self.cache = Cache()
        self.engine = engine
        primitive = ChooseOne(Prompt("p", "\n:"), Labels(("a", "b", "c"), (1, 2, 3)))
        clock = asyncio.get_running_loop().time
        self.pool = EnginePool(
            [("one", engine)],
            primitive.request("probe"),
            IDENTITY,
            Health(failures_to_open=5, probe_interval_s=1.0),
            clock=clock,
            sleep=self.sleep,
            on_change=lambda _, up, why: self.changes.append(up),
            on_call=lambda outcome, seconds: None,
        )
        self.batcher = Batcher(self.pool.score, max_items=8, max_wait_s=0.001, concurrency=2)
        self.router = Router(
            rule_set=RULES,
            primitive=primitive,
            calibration=Calibration(artefact(RULES)),
            asker=Asker(
                cache=CacheBatch(self.cache),
                batcher=self.batcher,
                pool=self.pool,
                budget=RetryBudget(clock, share=1.0),
                patience=Patience(**patience),  # type: ignore[arg-type]
                clock=clock,
                sleep=self.sleep,
                jitter=lambda: 1.0,
            ),
            clock=clock,
            cache_key=lambda tenant, text: f"{tenant}/{text}",
        )

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    async def route(self, text: str = "label 1", tenant: str | None = None) -> Routed:
        async with asyncio.timeout(10):
            return await self.router.route(Ticket(id="1", text=text, tenant=tenant))


def failing(errors: Iterable[Exception | None]) -> ScriptedEngine:
    """Raises these in turn, None for an answer; then answers."""
    script = iter(errors)

    def turn(_: Sequence[ScoreRequest]) -> None:
        error = next(script, None)
        if error is not None:
            raise error

    return ScriptedEngine(turn)


def code(routed: Routed) -> str:
    return routed.decision.reasons[0].code


async def test_a_scored_ticket_is_decided_and_remembered() -> None:
    bench = Bench(ScriptedEngine())
    first = await bench.route()
    assert (first.decision.action, first.decision.category, first.cached) == ("route", "login", False)
    await asyncio.sleep(0)
    second = await bench.route()
    assert second.cached
    assert second.decision == first.decision
    assert len(bench.engine.calls) == 1


async def test_tickets_that_arrive_together_share_one_cache_round_trip() -> None:
    bench = Bench(ScriptedEngine())
    await asyncio.gather(*(bench.route(f"label 0 {n}") for n in range(8)))
    assert bench.cache.reads == [8]


async def test_tenants_never_share_an_entry() -> None:
    bench = Bench(ScriptedEngine())
    await bench.route(tenant="a")
    await asyncio.sleep(0)
    assert not (await bench.route(tenant="b")).cached


async def test_a_passing_failure_is_retried_with_growing_jittered_waits() -> None:
    bench = Bench(failing([EngineUnavailable("a"), EngineUnavailable("b")]), first_backoff_s=0.2)
    assert code(await bench.route()) == "certified"
    assert bench.slept == [0.2, 0.4]


async def test_the_engines_own_retry_time_is_honoured() -> None:
    bench = Bench(failing([EngineUnavailable("busy", retry_after_s=3.0)]), first_backoff_s=0.2)
    await bench.route()
    assert bench.slept == [3.2]


async def test_an_engine_that_only_fails_on_this_ticket_costs_only_this_ticket() -> None:
    bench = Bench(failing([EngineUnavailable("x")] * 3), attempts=3)
    assert code(await bench.route()) == "engine_unavailable"  # the probe after three failures was answered
    assert bench.changes == []
    assert code(await bench.route("label 2")) == "certified"


async def test_an_engine_that_is_down_is_waited_for_and_nobody_is_escalated() -> None:
    bench = Bench(failing([EngineUnavailable("down")] * 40), attempts=3)
    routed = await asyncio.gather(*(bench.route(f"label {n % 3} {n}") for n in range(20)))
    assert {code(r) for r in routed} == {"certified"}
    assert bench.changes == [False, True]


async def test_under_escalate_people_get_the_ticket_after_the_stated_wait() -> None:
    bench = Bench(failing(repeat(EngineUnavailable("down"))), on_engine_down="escalate", max_wait_s=0.05)
    assert code(await bench.route()) == "engine_unavailable"
    assert bench.changes == [False]
    await bench.pool.aclose()


@pytest.mark.parametrize(
    ("error", "expected", "asked"),
    [
        (RequestRefused("HTTP 400", 400), "engine_refused", 1),
        (TooLong(9000, 4000), "too_long", 1),
        (InvalidAnswer("NaN"), "invalid_answer", 3),
    ],
)
async def test_a_ticket_that_cannot_be_scored_goes_to_people_with_the_reason(
    error: Exception, expected: str, asked: int
) -> None:
    bench = Bench(failing([error] * 20))
    routed = await bench.route()
    assert (routed.decision.action, code(routed)) == ("escalate", expected)
    assert len(bench.engine.calls) == asked
    assert bench.changes == []
    assert bench.cache.held == {}


async def test_a_ticket_that_ends_the_engine_twice_goes_to_people_alone() -> None:
    def poison(requests: Sequence[ScoreRequest]) -> None:
        if any("poison" in r.item for r in requests):
            raise EngineDropped("closed")

    bench = Bench(ScriptedEngine(poison))
    assert code(await bench.route("poison")) == "engine_dropped"
    assert sum("poison" in item for call in bench.engine.calls for item in call) == 2
    assert code(await bench.route("label 1")) == "certified"


async def test_one_death_of_the_engine_is_counted_once_for_a_ticket_on_stale_connections() -> None:
    """Every pooled connection to a killed server ends without an answer: that says nothing about the ticket."""
    bench = Bench(failing([EngineDropped("stale")] * 4))
    assert code(await bench.route()) == "certified"
    assert bench.changes == [False, True]


@in_virtual_time
async def test_a_slow_engine_ends_at_the_tickets_deadline() -> None:
    class Slow(ScriptedEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            if any("label" in request.item for request in requests):  # probes are answered
                await asyncio.sleep(30)
            return await super().score(requests)

    bench = Bench(Slow(), deadline_s=0.05)
    assert code(await bench.route()) == "engine_timeout"
    assert bench.changes == []
    await bench.batcher.aclose()


async def test_a_cached_row_of_another_length_is_a_miss() -> None:
    bench = Bench(ScriptedEngine())
    bench.cache.held["None/label 1"] = LabelScores.from_logprobs((-0.1, -3.0))
    assert not (await bench.route()).cached


async def test_an_answer_without_all_of_its_labels_is_not_remembered() -> None:
    class Partial(ScriptedEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            await super().score(requests)
            return [LabelScores.from_logprobs((-0.01, -6.0, -6.0), unknown=(1, 2)) for _ in requests]

    bench = Bench(Partial())
    assert not (await bench.route()).cached
    await asyncio.sleep(0)
    assert bench.cache.held == {}
    assert not (await bench.route()).cached


async def test_what_is_left_of_a_ticket_is_scored_and_keyed() -> None:
    bench = Bench(ScriptedEngine())
    ticket = Ticket(id="1", text="label 1 and what was quoted", shortened="label 1")
    await bench.router.route(ticket)
    await asyncio.sleep(0)
    assert list(bench.cache.held) == ["None/label 1"]
    assert not any("quoted" in item for call in bench.engine.calls for item in call)


async def test_a_cache_that_raises_is_a_miss() -> None:
    bench = Bench(ScriptedEngine())

    async def broken(keys: Sequence[str]) -> Sequence[LabelScores | None]:
        raise RuntimeError("a bug in the adapter")

    bench.cache.get_many = broken  # type: ignore[method-assign]
    assert code(await bench.route()) == "certified"
