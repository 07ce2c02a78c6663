"""An engine that hangs, in virtual time: how soon that is known, and what becomes of the tickets that met it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tests.runtime.simulation import PRIMITIVE, PlannedEngine, Simulated, now
from tests.runtime.virtual_time import run
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineSilent
from worker.runtime.asking import Patience
from worker.runtime.endpoints import Health

TIMEOUT_S = 30.0
"""The adapter's own limit for one call."""
PROBE_S = Health().probe_timeout_s
INTERVAL_S = Health().probe_interval_s
PROBE = PRIMITIVE.request("probe")


class Hanging(PlannedEngine):
    """What it is asked while it hangs it never answers."""

    def __init__(self, hangs: Callable[[Sequence[ScoreRequest]], bool], answer_s: float = 0.02) -> None:
        super().__init__(latency_s=lambda at, in_flight: answer_s)
        self.hangs = hangs

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        if self.hangs(requests):
            await asyncio.sleep(TIMEOUT_S)
            raise EngineSilent("no whole answer in time")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await super().score(requests)
        except TimeoutError:
            raise EngineSilent("no whole answer in time") from None


class Stubborn(Hanging):
    """Computes to the end what nobody waits for any longer, as many engines do; counts the probes that it has."""

    def __init__(self, answer_s: float) -> None:
        super().__init__(never, answer_s)
        self.probes = self.at_once = self.most_at_once = 0

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        return await asyncio.shield(asyncio.ensure_future(self._compute(requests)))

    async def _compute(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        is_probe = requests[0] == PROBE
        self.probes += is_probe
        self.at_once += is_probe
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await super().score(requests)
        finally:
            self.at_once -= is_probe


def between(start: float, end: float) -> Callable[[object], bool]:
    return lambda _: start <= now() < end


def never(_: object) -> bool:
    return False


def test_a_lone_ticket_that_meets_a_hanging_engine_keeps_its_route_and_is_asked_about_once_it_is_back() -> None:
    async def main() -> None:
        simulated = Simulated(Hanging(between(10.0, 60.0)))
        async with simulated.running():
            await asyncio.sleep(12.0)
            await simulated.send([0], per_second=1e9)
        assert simulated.codes() == {"certified": 1}
        (down, up) = simulated.changes
        assert 40.0 <= down[0] <= 12.0 + TIMEOUT_S + PROBE_S + 0.1
        assert up[0] <= 60.0 + 50.0 / 3 + INTERVAL_S
        assert simulated.ends[0][0] <= up[0] + 1.0

    run(main())


def test_of_two_engines_one_that_hangs_costs_a_ticket_one_wait_and_is_out_soon() -> None:
    async def main() -> None:
        simulated = Simulated(Hanging(lambda _: True), Hanging(never))
        async with simulated.running():
            await simulated.send([0], per_second=1e9)
            at, _ = simulated.ends[0]
            assert at <= TIMEOUT_S + PROBE_S + 1.0, "a probe tells whether the ticket or the engine is at fault"
            await simulated.send([1], per_second=1e9)
            assert simulated.ends[1][0] <= at + 1.0
            await asyncio.sleep(PROBE_S)
        assert simulated.codes() == {"certified": 2}
        ((down, name, _),) = simulated.changes
        assert name == "e0"
        assert down <= TIMEOUT_S + PROBE_S + 0.1
        assert simulated.pool.outages == 0

    run(main())


def test_the_time_that_two_of_three_engines_hung_is_not_the_tickets() -> None:
    async def main() -> None:
        simulated = Simulated(Hanging(lambda _: True), Hanging(between(TIMEOUT_S, 1e9)), Hanging(never))
        async with simulated.running():
            await simulated.send([0], per_second=1e9)
        assert simulated.codes() == {"certified": 1}
        assert 2 * TIMEOUT_S <= simulated.ends[0][0] <= 2 * (TIMEOUT_S + PROBE_S) + 1.0

    run(main())


def test_before_a_ticket_is_given_up_it_waits_for_a_probe_and_not_for_the_engines_own_timeout() -> None:
    async def main() -> None:
        patience = Patience(deadline_s=20.0, on_engine_down="escalate", max_wait_s=60.0)
        simulated = Simulated(Hanging(lambda _: True), patience=patience)
        async with simulated.running():
            await simulated.send([0], per_second=1e9)
        assert simulated.codes() == {"engine_unavailable": 1}
        assert simulated.ends[0][0] <= 20.0 + PROBE_S + 60.0 + 1.0

    run(main())


def test_a_ticket_over_which_the_whole_engine_hangs_again_and_again_goes_to_people_and_its_neighbours_do_not() -> None:
    async def main() -> None:
        busy_until = 0.0

        def hangs(requests: Sequence[ScoreRequest]) -> bool:
            nonlocal busy_until
            if any("label 1 7" in request.item for request in requests):
                busy_until = now() + TIMEOUT_S + 10.0
            return now() < busy_until

        simulated = Simulated(Hanging(hangs))
        async with simulated.running(), asyncio.timeout(1_000):
            await simulated.send(range(60), per_second=1e9)
        poisoned = {number: routed for number, (_, routed) in simulated.ends.items() if number == 7}
        assert poisoned[7].decision.reasons[0].code == "engine_timeout"
        assert simulated.codes() == {"certified": 59, "engine_timeout": 1}

    run(main())


def test_neighbours_of_tickets_over_which_one_of_two_engines_hangs_each_time_keep_their_routes() -> None:
    async def main() -> None:
        poisoned = {f"label {number % 3} {number}" for number in (100, 101, 102)}

        def hanging() -> Hanging:
            busy_until = 0.0

            def hangs(requests: Sequence[ScoreRequest]) -> bool:
                nonlocal busy_until
                if any(poison in request.item for request in requests for poison in poisoned):
                    busy_until = now() + TIMEOUT_S + 10.0
                return now() < busy_until

            return Hanging(hangs, answer_s=0.1)

        simulated = Simulated(hanging(), hanging(), batch_items=32)
        async with simulated.running(), asyncio.timeout(2_000):
            await simulated.send(range(300), per_second=5.0, most=256)
        escalated = {n for n, (_, routed) in simulated.ends.items() if routed.decision.reasons[0].code != "certified"}
        assert {100, 101, 102} <= escalated
        assert len(escalated) <= 5

    run(main())


def test_tickets_that_are_never_answered_are_no_outage_however_many_there_are() -> None:
    async def main() -> None:
        simulated = Simulated(Hanging(lambda requests: requests[0] != PROBE), batch_items=1)
        async with simulated.running():
            await simulated.send(range(40), per_second=1e9)
        assert simulated.changes == []
        assert simulated.codes() == {"engine_timeout": 40}

    run(main())


def test_an_engine_that_is_slow_is_given_time_by_a_probe_as_well() -> None:
    async def main() -> None:
        simulated = Simulated(Hanging(never, answer_s=3 * PROBE_S))
        async with simulated.running():
            await simulated.send([0], per_second=1e9)
            assert not await simulated.pool.suspect()
            await asyncio.sleep(600.0)
        assert simulated.changes == []
        assert simulated.codes() == {"certified": 1}

    run(main())


def test_an_engine_that_is_never_again_as_fast_as_it_was_is_used_again_all_the_same() -> None:
    async def main() -> None:
        engine = Hanging(never)
        simulated = Simulated(engine)
        async with simulated.running():
            await simulated.send(range(20), per_second=100)
            engine.latency_s = lambda at, in_flight: 4 * PROBE_S
            assert await simulated.pool.suspect()
            async with asyncio.timeout(120):
                await simulated.pool.wait_until_up()
            assert not await simulated.pool.suspect()

    run(main())


def test_an_idle_engine_that_is_slow_is_never_out_and_has_one_probe_at_a_time() -> None:
    async def main() -> None:
        engine = Stubborn(answer_s=4 * PROBE_S)
        simulated = Simulated(engine)
        async with simulated.running():
            await asyncio.sleep(900.0)
        assert simulated.changes == []
        assert engine.probes > 20
        assert engine.most_at_once == 1

    run(main())


def test_a_probe_that_is_answered_late_brings_the_engine_back_at_once() -> None:
    async def main() -> None:
        engine = Stubborn(answer_s=4 * PROBE_S)
        simulated = Simulated(engine)
        pool = simulated.pool
        assert await pool.suspect()
        assert now() <= PROBE_S + 0.1
        assert not pool.is_up
        await pool.wait_until_up()
        assert now() <= 4 * PROBE_S + 0.1
        assert not await pool.suspect(), "it is known by now how long it takes"
        assert (engine.probes, engine.most_at_once) == (2, 1)
        assert [is_up for _, _, is_up in simulated.changes] == [False, True]
        await pool.aclose()

    run(main())


def test_nobody_asks_an_engine_that_has_not_answered_a_probe_for_another_and_closing_gives_it_up() -> None:
    async def main() -> None:
        engine = Stubborn(answer_s=4 * PROBE_S)
        simulated = Simulated(engine)
        before = asyncio.all_tasks()
        simulated.pool.start()
        await asyncio.sleep(INTERVAL_S + 0.1)
        assert engine.probes == 1
        assert await simulated.pool.suspect()
        assert await simulated.pool.suspect()
        assert engine.probes == 1
        await simulated.pool.aclose()
        await asyncio.sleep(4 * PROBE_S)
        assert asyncio.all_tasks() == before

    run(main())
