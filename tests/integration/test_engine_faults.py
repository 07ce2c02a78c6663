"""From a ticket to its decision over a real HTTP server that misbehaves; all but the broker is the real part."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.core.sets import artefact, rule_set
from tests.integration.loop_lag import LoopLag
from tests.servers.stub_engine import Behaviour, StubEngine, gzip_bomb
from tests.waiting import until
from worker.adapters.memory import MemoryCache
from worker.adapters.sglang import SGLangEngine
from worker.core.policy import Calibration
from worker.core.ticket import Ticket
from worker.errors import EngineUnavailable
from worker.runtime.asking import Asker, Patience
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.canary import Canaries, find_canaries
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.limiter import RetryBudget
from worker.runtime.question import easy_tickets, prepare_question
from worker.runtime.router import Routed, Router

RULES = rule_set()
LABELS = ("billing", "login", "bug")
KEYWORDS = {label: f" {label}" for label in LABELS}
DEADLINE_S = 0.5
MARK = "Marzipan"


class Deployment:
    """A router over stub servers."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, bool]] = []
        self.outcomes: Counter[str] = Counter()
        self.checks: Counter[bool] = Counter()
        self.alarmed_at: float | None = None
        self.decided: list[tuple[float, int, Routed]] = []
        self.marked: frozenset[int] = frozenset()
        """Tickets whose text holds MARK."""

    async def start(
        self,
        stack: contextlib.AsyncExitStack,
        stubs: Sequence[StubEngine],
        *,
        health: Health | None = None,
        patience: Patience | None = None,
        timeout_s: float = 20.0,
        batch_items: int = 8,
    ) -> Deployment:
        engines = [(f"e{n}", SGLangEngine(stub.url, timeout_s=timeout_s)) for n, stub in enumerate(stubs)]
        for _, engine in engines:
            stack.push_async_callback(engine.aclose)
        question = await prepare_question(RULES, engines[0][1])
        self.pool = EnginePool(
            engines,
            question.primitive.request("probe"),
            question.identity,
            health or Health(),
            clock=time.monotonic,
            sleep=asyncio.sleep,
            on_change=lambda name, up, _: self.changes.append((name, up)),
            on_call=lambda outcome, _: self.outcomes.update([outcome]),
            on_rows=self._checked,
        )
        texts = [text for _, text in easy_tickets(RULES)]
        known = await find_canaries(question.primitive, texts, engines[0][1])
        assert len(known) == 3
        self.pool.watch_rows(Canaries(known, random.Random(1).random))
        batcher = Batcher(
            self.pool.score, batch_items, max_wait_s=0.005, concurrency=16 * len(stubs), ask_alone=self.pool.score_alone
        )
        self.router = Router(
            rule_set=RULES,
            primitive=question.primitive,
            calibration=Calibration(artefact(RULES, fingerprints=question.fingerprints)),
            asker=Asker(
                cache=CacheBatch(MemoryCache()),
                batcher=batcher,
                pool=self.pool,
                budget=RetryBudget(time.monotonic),
                patience=patience or Patience(first_backoff_s=0.02),
                clock=time.monotonic,
                sleep=asyncio.sleep,
                jitter=random.random,
            ),
            clock=time.monotonic,
            cache_key=lambda tenant, text: text,
        )
        self.pool.start()
        stack.push_async_callback(self.pool.aclose)
        stack.push_async_callback(batcher.aclose)
        return self

    async def route(self, number: int) -> Routed:
        text = f"ticket {number}: {MARK * (number in self.marked)} trouble with {LABELS[number % 3]}"
        routed = await self.router.route(Ticket(id=str(number), text=text))
        self.decided.append((time.monotonic(), number, routed))
        return routed

    async def route_all(self, numbers: Sequence[int]) -> None:
        await asyncio.gather(*map(self.route, numbers))

    def codes(self, *, marked: bool | None = None) -> Counter[str]:
        """Of all tickets, or of those that are marked or not."""
        return Counter(
            routed.decision.reasons[0].code
            for _, number, routed in self.decided
            if marked in (None, number in self.marked)
        )

    def wrong(self) -> list[tuple[float, int]]:
        return [
            (at, number)
            for at, number, routed in self.decided
            if routed.decision.action == "route" and routed.decision.category != LABELS[number % 3]
        ]

    def _checked(self, endpoint: str, in_order: bool, alarm: str | None) -> None:
        self.checks[in_order] += 1
        if not in_order and self.alarmed_at is None:
            self.alarmed_at = time.monotonic()


@pytest.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as closing:
        yield closing


@pytest.fixture
async def stub(stack: contextlib.AsyncExitStack) -> StubEngine:
    return await stack.enter_async_context(StubEngine(Behaviour(keywords=dict(KEYWORDS))))


@pytest.mark.parametrize("fault", ["hang", "hang_unread", "half_answer", "slow_loris", "slow_headers"])
async def test_one_deadline_ends_every_kind_of_waiting(stub: StubEngine, fault: str) -> None:
    stub.behaviour.fault = fault
    engine = SGLangEngine(stub.url, timeout_s=DEADLINE_S)
    question = await _question(stub)
    async with LoopLag() as lag:
        for _ in range(3):
            started = time.perf_counter()
            with pytest.raises(EngineUnavailable):
                await engine.score([question.request("a"), question.request("b")])
            took_s = time.perf_counter() - started
            # Three turns of the loop: the timer, the cancelled request, and this test. What others do is not its fault.
            assert DEADLINE_S <= took_s <= DEADLINE_S + 0.05 + 3 * lag.latest_s
    await engine.aclose()


async def test_rows_in_another_order_are_noticed_and_nothing_more_is_routed_by_them(
    stub: StubEngine, stack: contextlib.AsyncExitStack
) -> None:
    deployment = await Deployment().start(stack, [stub], health=Health(probe_interval_s=0.1))
    await deployment.route_all(range(400))
    assert deployment.checks == {True: deployment.checks[True]}
    assert deployment.codes() == {"certified": 400}
    assert not deployment.wrong()
    stub.behaviour.fault = "swapped_rows"
    faulty = asyncio.create_task(deployment.route_all(range(400, 1_000)))
    await until(lambda: not deployment.pool.is_up)
    assert deployment.pool.alarm is not None
    assert "another's" in str(deployment.pool.trouble)
    stub.behaviour.fault = "none"
    async with asyncio.timeout(60):
        await faulty
    await deployment.route_all(range(1_000, 1_200))
    assert deployment.changes == [("e0", False), ("e0", True)]
    alarmed_at = deployment.alarmed_at
    assert alarmed_at is not None
    under_way = 2 * 16 * 8  # tickets in the calls at that moment, and in those answered in the same turn of the loop
    wrong = [number for at, number in deployment.wrong() if at > alarmed_at]
    assert len(wrong) <= under_way
    assert max(wrong, default=0) < 1_000
    assert deployment.pool.alarm is not None, "it is watched closely for five more minutes"
    assert set(deployment.codes()) <= {"certified", "invalid_answer"}


async def test_an_engine_that_says_it_has_too_much_gets_fewer_calls_and_no_storm(
    stub: StubEngine, stack: contextlib.AsyncExitStack
) -> None:
    stub.behaviour.capacity, stub.behaviour.latency_s = 3, 0.02
    deployment = await Deployment().start(
        stack, [stub], batch_items=1, patience=Patience(attempts=10, first_backoff_s=0.05), health=Health()
    )
    before = stub.counters.requests
    async with asyncio.timeout(120):
        await deployment.route_all(range(600))
    refused = deployment.outcomes["unavailable"]
    assert refused > 0, "or nothing was tested"
    assert refused < 0.5 * 600
    assert stub.counters.requests - before < 1.6 * 600
    assert deployment.codes()["certified"] > 0.95 * 600
    assert deployment.pool._endpoints[0].limit.limit < 16


async def test_the_time_that_a_busy_engine_asks_for_is_given(
    stub: StubEngine, stack: contextlib.AsyncExitStack
) -> None:
    deployment = await Deployment().start(stack, [stub])
    stub.behaviour.fault, stub.behaviour.status, stub.behaviour.retry_after = "status", 429, "1"
    stub.behaviour.times = 1
    started = time.monotonic()
    assert (await deployment.route(1)).decision.reasons[0].code == "certified"
    assert time.monotonic() - started >= 1.0


async def test_a_thousand_equal_tickets_at_once_are_one_request(
    stub: StubEngine, stack: contextlib.AsyncExitStack
) -> None:
    deployment = await Deployment().start(stack, [stub])
    stub.behaviour.latency_s, stub.behaviour.counted = 0.05, "ticket 7:"
    await asyncio.gather(*(deployment.route(7) for _ in range(1_000)))
    assert stub.counters.counted == 1
    assert len(deployment.decided) == 1_000


async def test_equal_tickets_that_keep_coming_are_one_request(
    stub: StubEngine, stack: contextlib.AsyncExitStack
) -> None:
    """Also in the moment between the engine's answer and the cache's knowing it."""
    deployment = await Deployment().start(stack, [stub])
    stub.behaviour.latency_s, stub.behaviour.counted = 0.02, "ticket 7:"
    running: set[asyncio.Task[Routed]] = set()
    for _ in range(2_000):
        running.add(asyncio.create_task(deployment.route(7)))
        await asyncio.sleep(0)
    await asyncio.gather(*running)
    assert stub.counters.counted == 1


@pytest.mark.parametrize(
    "fault",
    ["status", "close", "reset", "truncated", "html", "nan", "missing_row", "redirect", "gzip_bomb", "not_http"],
)
async def test_a_third_of_the_answers_being_bad_costs_tries_and_no_ticket(
    stub: StubEngine, stack: contextlib.AsyncExitStack, fault: str
) -> None:
    gzip_bomb()  # made by and by in this process, which is no fault of the worker
    deployment = await Deployment().start(stack, [stub], health=Health(probe_interval_s=0.05))
    stub.behaviour.fault, stub.behaviour.share = fault, 0.3
    async with LoopLag() as lag, asyncio.timeout(120):
        await deployment.route_all(range(120))
    assert len(deployment.decided) == 120
    assert not deployment.wrong()
    assert set(deployment.codes()) <= {"certified", "invalid_answer", "engine_unavailable", "engine_dropped"}
    assert lag.longest_s < 0.25


async def test_of_two_engines_one_that_dies_costs_nothing_and_is_used_again_when_it_is_back(
    stub: StubEngine, stack: contextlib.AsyncExitStack
) -> None:
    other = await stack.enter_async_context(StubEngine(Behaviour(keywords=dict(KEYWORDS))))
    deployment = await Deployment().start(stack, [stub, other], health=Health(probe_interval_s=0.1))
    await deployment.route_all(range(300))
    assert stub.counters.answered > 10
    assert other.counters.answered > 10
    await other.stop()
    await deployment.route_all(range(300, 600))
    await until(lambda: ("e1", False) in deployment.changes)
    await other.start()
    await until(lambda: ("e1", True) in deployment.changes)
    answered = other.counters.items
    for first in range(600, 4_600, 200):  # it gets few calls at first
        await deployment.route_all(range(first, first + 200))
        if other.counters.items > answered + 50:
            break
    else:
        pytest.fail("it is up again and gets no work")
    assert deployment.codes() == {"certified": len(deployment.decided)}
    assert deployment.pool.outages == 0


@pytest.mark.parametrize(("tickets", "stubs"), [(1, 1), (20, 1), (20, 2)])
async def test_tickets_that_end_their_connections_go_to_people_alone_and_are_no_outage(
    stub: StubEngine, stack: contextlib.AsyncExitStack, tickets: int, stubs: int
) -> None:
    others = [StubEngine(Behaviour(keywords=dict(KEYWORDS))) for _ in range(stubs - 1)]
    engines = [stub, *[await stack.enter_async_context(other) for other in others]]
    deployment = await Deployment().start(stack, engines, batch_items=32)
    deployment.marked = frozenset(random.Random(tickets).sample(range(300), tickets))
    for engine in engines:
        engine.behaviour.poison, engine.behaviour.latency_s = MARK, 0.02
    before = sum(engine.counters.requests for engine in engines)
    async with asyncio.timeout(60):
        await deployment.route_all(range(300))
    assert deployment.codes(marked=True) == {"engine_dropped": tickets}
    assert deployment.codes(marked=False) == {"certified": 300 - tickets}
    assert deployment.changes == [], "nothing was wrong with the engines"
    asked = sum(engine.counters.requests for engine in engines) - before
    assert asked <= 300 / 8 + tickets * (2 * 5 + 1 + 1 + 2), "halving, one more try and a probe or two for each"


@pytest.mark.parametrize("stubs", [1, 2])
async def test_a_ticket_that_ends_the_whole_engine_is_found_by_few_deaths_and_neighbours_are_scored(
    stub: StubEngine, stack: contextlib.AsyncExitStack, stubs: int
) -> None:
    """Each time calls beside it get no answer either, and then the engine is away: what is known of them all stays."""
    others = [StubEngine(Behaviour(keywords=dict(KEYWORDS))) for _ in range(stubs - 1)]
    engines = [stub, *[await stack.enter_async_context(other) for other in others]]
    deployment = await Deployment().start(stack, engines, batch_items=8, health=Health(probe_interval_s=0.05))
    deployment.marked = frozenset({70, 150})
    for engine in engines:
        engine.behaviour.poison, engine.behaviour.poison_outage_s, engine.behaviour.latency_s = MARK, 0.3, 0.02
    async with asyncio.timeout(60):
        await deployment.route_all(range(200))
    assert deployment.codes(marked=True) == {"engine_dropped": 2}
    assert deployment.codes(marked=False) == {"certified": 198}
    assert sum(engine.counters.deaths for engine in engines) <= 2 * 5


async def test_tickets_that_the_engine_never_answers_cost_their_neighbours_one_wait_and_no_automation(
    stub: StubEngine, stack: contextlib.AsyncExitStack
) -> None:
    patience = Patience(attempts=3, deadline_s=30.0)
    deployment = await Deployment().start(stack, [stub], batch_items=32, timeout_s=2.0, patience=patience)
    deployment.marked = frozenset(range(15, 200, 32))
    stub.behaviour.slow, stub.behaviour.latency_s = MARK, 0.01
    async with asyncio.timeout(120):
        await deployment.route_all(range(200))
    assert deployment.codes(marked=False) == {"certified": 200 - len(deployment.marked)}
    assert set(deployment.codes(marked=True)) <= {"engine_timeout", "engine_unavailable"}


async def _question(stub: StubEngine):  # type: ignore[no-untyped-def]
    engine = SGLangEngine(stub.url, timeout_s=20.0)
    fault, stub.behaviour.fault = stub.behaviour.fault, "none"
    try:
        return (await prepare_question(RULES, engine)).primitive
    finally:
        stub.behaviour.fault = fault
        await engine.aclose()
