"""EnginePool: balanced, ejected, readmitted; ConcurrencyLimit: a slower engine is given less."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.runtime.engines import IDENTITY, ScriptedEngine
from worker.core.scores import ScoreRequest
from worker.errors import EngineDropped, EngineUnavailable, RequestRefused
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.limiter import ConcurrencyLimit, RetryBudget

REQUEST = ScoreRequest("p", "label 0", (1, 2, 3))
PROBE = ScoreRequest("p", "probe", (1, 2, 3))


class Switch:
    """An engine that can be turned off, and counts probes."""

    def __init__(self, *, on: bool = True, delay_s: float = 0.0) -> None:
        self.on = on
        self.engine = ScriptedEngine(self.script, delay_s)

    def script(self, requests: Sequence[ScoreRequest]) -> None:
        if not self.on:
            raise EngineUnavailable("off")

    @property
    def tickets(self) -> int:
        return sum(call != ["probe"] for call in self.engine.calls)

    @property
    def probes(self) -> int:
        return sum(call == ["probe"] for call in self.engine.calls)


class Ticks:
    """Sleeps that take a turn of the loop; counts them."""

    def __init__(self) -> None:
        self.now = 0.0

    async def __call__(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def pool(*switches: Switch, sleep: Ticks | None = None, **health: object) -> tuple[EnginePool, list[tuple[str, bool]]]:
    changes: list[tuple[str, bool]] = []
    ticks = sleep or Ticks()
    made = EnginePool(
        [(f"e{n}", switch.engine) for n, switch in enumerate(switches)],
        PROBE,
        IDENTITY,
        Health(**{"failures_to_open": 3, **health}),  # type: ignore[arg-type]
        clock=lambda: ticks.now,
        sleep=ticks,
        on_change=lambda name, up, _: changes.append((name, up)),
        on_call=lambda outcome, seconds: None,
    )
    return made, changes


async def test_calls_go_to_the_endpoint_with_the_fewest() -> None:
    first, second = Switch(delay_s=0.01), Switch(delay_s=0.01)
    made, _ = pool(first, second)
    await asyncio.gather(*(made.score([REQUEST]) for _ in range(20)))
    assert (first.tickets, second.tickets) == (10, 10)


async def test_a_call_that_must_be_alone_has_no_other_beside_it_and_keeps_none_waiting_for_long() -> None:
    beside: list[int] = []

    def look(requests: Sequence[ScoreRequest]) -> None:
        if requests[0].item == "suspect":
            beside.append(made._endpoints[0].outstanding)

    switch = Switch(delay_s=0.002)
    switch.engine.script = look
    made, _ = pool(switch)
    suspect = replace(REQUEST, item="suspect")
    async with asyncio.timeout(30):
        await asyncio.gather(
            *(made.score([REQUEST]) for _ in range(50)),
            *(made.score_alone([suspect]) for _ in range(5)),
            *(made.score([REQUEST]) for _ in range(50)),
        )
    assert beside == [1] * 5
    cancelled = [asyncio.create_task(made.score_alone([suspect])) for _ in range(3)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    async with asyncio.timeout(30):
        await made.score([REQUEST])
    assert made._endpoints[0].outstanding == 0


async def test_calls_that_are_dropped_in_a_row_are_an_outage_only_where_a_probe_fails_too() -> None:
    probe_fails = False

    def drop(requests: Sequence[ScoreRequest]) -> None:
        if requests[0] != PROBE or probe_fails:
            raise EngineDropped("gone")

    switch = Switch()
    switch.engine.script = drop
    made, changes = pool(switch)
    for _ in range(21):
        with pytest.raises(EngineDropped):
            await made.score([REQUEST])
    assert changes == []
    probe_fails = True
    for _ in range(3):
        with pytest.raises(EngineDropped):
            await made.score([REQUEST])
    assert changes == [("e0", False)]
    await made.aclose()


async def test_an_endpoint_is_not_down_before_the_last_consecutive_failure() -> None:
    switch = Switch(on=False)
    made, changes = pool(switch)
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await made.score([REQUEST])
    switch.on = True
    await made.score([REQUEST])
    switch.on = False
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await made.score([REQUEST])
    assert changes == []
    with pytest.raises(EngineUnavailable):
        await made.score([REQUEST])
    assert changes == [("e0", False)]
    await made.aclose()


async def test_a_dead_endpoint_gets_probes_only_and_the_other_does_the_work() -> None:
    dead, alive = Switch(on=False), Switch()
    made, changes = pool(dead, alive)
    made.start()
    failed = 0
    for _ in range(40):
        try:
            await made.score([REQUEST])
        except EngineUnavailable:
            failed += 1
    assert failed == 1, "the next tickets go to the other one, which has more calls outstanding but answers"
    async with asyncio.timeout(5):
        while ("e0", False) not in changes:
            await asyncio.sleep(0)
    tickets_while_dead = dead.tickets
    assert made.is_up
    dead.on = True
    async with asyncio.timeout(5):
        while ("e0", True) not in changes:
            await asyncio.sleep(0)
    assert dead.tickets == tickets_while_dead  # readmitted by a probe, not by a ticket
    assert dead.probes > 0
    await made.aclose()


async def test_all_down_refuses_at_once_and_waiters_go_on_when_one_is_back() -> None:
    switch = Switch(on=False)
    made, _ = pool(switch)
    for _ in range(3):
        with pytest.raises(EngineUnavailable):
            await made.score([REQUEST])
    assert not made.is_up
    with pytest.raises(EngineUnavailable, match="every engine is down: e0: off"):
        await made.score([REQUEST])
    assert switch.tickets == 3
    waiting = asyncio.create_task(made.wait_until_up())
    switch.on = True
    async with asyncio.timeout(5):
        await waiting
    assert await made.score([REQUEST])


async def test_refusals_of_a_ticket_never_open_the_breaker() -> None:
    def refuse(_: Sequence[ScoreRequest]) -> None:
        raise RequestRefused("400", 400)

    switch = Switch()
    switch.engine.script = refuse
    made, changes = pool(switch)
    for _ in range(20):
        with pytest.raises(RequestRefused):
            await made.score([REQUEST])
    assert changes == []


async def test_dropped_connections_in_a_row_do() -> None:
    def drop(_: Sequence[ScoreRequest]) -> None:
        raise EngineDropped("closed")

    switch = Switch()
    switch.engine.script = drop
    made, changes = pool(switch)
    for _ in range(3):
        with pytest.raises(EngineDropped):
            await made.score([REQUEST])
    assert changes == [("e0", False)]
    await made.aclose()


async def test_suspicion_asks_the_engine_once_for_all_who_suspect() -> None:
    switch = Switch(delay_s=0.01)
    made, _ = pool(switch)
    assert await asyncio.gather(*(made.suspect() for _ in range(10))) == [False] * 10
    assert switch.probes == 1
    switch.on = False
    assert await made.suspect()
    assert not made.is_up
    await made.aclose()


async def test_an_idle_endpoint_is_probed_and_its_death_is_known_without_a_ticket() -> None:
    switch = Switch()
    made, changes = pool(switch)
    made.start()
    async with asyncio.timeout(5):
        while not switch.probes:
            await asyncio.sleep(0)
        switch.on = False
        while not changes:
            await asyncio.sleep(0)
    assert switch.tickets == 0
    await made.aclose()


async def test_an_engine_that_comes_back_with_another_model_stays_out_until_it_is_itself_again() -> None:
    switch = Switch(on=False)
    made, changes = pool(switch)
    switch.engine.identified = replace(IDENTITY, model="another")
    for _ in range(3):
        with pytest.raises(EngineUnavailable):
            await made.score([REQUEST])
    switch.on = True
    async with asyncio.timeout(5):
        while "another model" not in str(made.trouble):
            await asyncio.sleep(0)
    assert not made.is_up
    switch.engine.identified = IDENTITY
    async with asyncio.timeout(5):
        await made.wait_until_up()
    assert changes == [("e0", False), ("e0", True)]


async def test_a_model_that_is_changed_behind_a_balancer_is_noticed_without_a_failure() -> None:
    switch = Switch()
    made, changes = pool(switch)
    made.start()
    switch.engine.identified = replace(IDENTITY, tokenizer="another")
    async with asyncio.timeout(5):
        while not changes:
            await asyncio.sleep(0)
    assert changes == [("e0", False)]
    await made.aclose()


async def test_never_more_calls_at_once_than_the_limit() -> None:
    most = 0

    def watch(_: Sequence[ScoreRequest]) -> None:
        nonlocal most
        most = max(most, made._endpoints[0].outstanding)

    switch = Switch(delay_s=0.002)
    switch.engine.script = watch
    made, _ = pool(switch, concurrency=4)
    await asyncio.gather(*(made.score([REQUEST]) for _ in range(40)))
    assert most == 4


def test_the_limit_falls_when_the_engine_turns_slow_and_does_not_grow_back_while_it_stays_so() -> None:
    limit = ConcurrencyLimit(64, target_s=1.0)
    for _ in range(200):
        limit.answered(0.5, limit.limit)
    assert limit.limit == 64
    for _ in range(2000):  # long enough for a drifting baseline to call 4 s normal
        limit.answered(4.0, limit.limit)
    assert limit.limit <= 2
    for _ in range(200):
        limit.answered(0.5, limit.limit)
    assert limit.limit >= 32


def test_refusals_shrink_the_limit_but_never_to_nothing() -> None:
    limit = ConcurrencyLimit(64, target_s=1.0)
    for _ in range(100):
        limit.refused()
    assert limit.limit == 1


def test_retries_are_a_tenth_of_the_requests_and_a_trickle() -> None:
    now = [0.0]
    budget = RetryBudget(lambda: now[0], share=0.1, per_second=1.0, most=100.0)
    for _ in range(1000):
        budget.first_attempt()
    retries = 0
    while budget.wait_s() == 0.0:
        retries += 1
    assert retries == 100
    assert budget.wait_s() > 0
    now[0] += 1.0
    assert budget.wait_s() == 0.0
