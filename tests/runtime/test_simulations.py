"""Batcher, breaker, limiter and retry budget in worlds made from a seed: minutes of faults in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

import pytest

from tests.runtime.engines import ScriptedEngine
from tests.runtime.simulation import PRIMITIVE, PlannedEngine, Simulated, now
from tests.runtime.virtual_time import run
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineDropped, EngineUnavailable, InvalidAnswer, RequestRefused
from worker.runtime.asking import Patience
from worker.runtime.batcher import GRACE_S, Batcher
from worker.runtime.endpoints import Health
from worker.runtime.limiter import ConcurrencyLimit, RetryBudget

LATENCY_TARGET_S = Health().latency_target_s


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# -- the batcher -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_whatever_is_at_fault_everybody_gets_the_own_row_or_the_own_error(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        run(_batches(seed))


async def _batches(seed: int) -> None:
    chance = random.Random(seed)
    poison = {f"label {n % 3} {n}" for n in range(60) if chance.random() < chance.choice([0.0, 0.02, 0.3])}
    error = chance.choice([RequestRefused("no"), EngineDropped("gone"), InvalidAnswer("NaN")])
    outage_until = chance.choice([0.0, 0.0, 0.05])

    def script(requests: Sequence[ScoreRequest]) -> None:
        if now() < outage_until:
            raise EngineUnavailable("away")
        if any(r.item in poison for r in requests):
            raise error

    engine = ScriptedEngine(script, delay_s=0.01)
    most = chance.randrange(1, 17)
    batcher = Batcher(engine.score, most, max_wait_s=0.005, concurrency=chance.randrange(1, 5))
    asked: list[tuple[str, asyncio.Task[LabelScores]]] = []
    for _ in range(60):
        text = f"label {chance.randrange(3)} {chance.randrange(60)}"
        asked.append((text, asyncio.create_task(batcher.score(ScoreRequest("p", text, (1, 2, 3))))))
        if chance.random() < 0.1:
            asked[chance.randrange(len(asked))][1].cancel()
        await asyncio.sleep(chance.choice([0.0, 0.0, 0.003, 0.02]))
    await asyncio.gather(*(task for _, task in asked), return_exceptions=True)
    for text, task in asked:
        if task.cancelled():
            continue
        if isinstance(task.exception(), EngineUnavailable):
            assert outage_until
        elif text in poison:
            assert task.exception() is error
        else:
            assert task.result().best_known == int(text[6])
    assert all(len(call) <= most for call in engine.calls)
    assert all(len(set(call)) == len(call) for call in engine.calls), "equal requests are one"
    await asyncio.sleep(GRACE_S + 0.01)
    assert not batcher._in_flight, "nothing is kept for long"


@pytest.mark.parametrize("size", [2, 3, 8, 31, 32, 33, 100, 128])
def test_one_poison_ticket_costs_at_most_two_logarithms_more_requests_wherever_it_stands(size: int) -> None:
    async def main(place: int) -> int:
        def script(requests: Sequence[ScoreRequest]) -> None:
            if any(r.item == f"label 0 {place}" for r in requests):
                raise EngineDropped("gone")

        engine = ScriptedEngine(script)
        batcher = Batcher(engine.score, size, max_wait_s=1.0, concurrency=4)
        requests = [ScoreRequest("p", f"label 0 {n}", (1, 2, 3)) for n in range(size)]
        found = await asyncio.gather(*map(batcher.score, requests), return_exceptions=True)
        assert [isinstance(row, EngineDropped) for row in found] == [n == place for n in range(size)]
        return len(engine.calls) - 1

    assert max(run(main(place)) for place in range(size)) <= 2 * math.ceil(math.log2(size)) + 1


# -- the breaker -------------------------------------------------------------------------------------------------------


class Spell(PlannedEngine):
    """Away in some spells; keeps the outcome of every call, and whether it was a probe."""

    def __init__(self, away: Sequence[tuple[float, float]], name: str = "e0") -> None:
        super().__init__(latency_s=lambda at, in_flight: 0.02)
        self.away = away
        self.name = name
        self.record: list[tuple[float, bool, bool]] = []
        """(when it ended, was it a probe, was it answered)."""

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        is_probe = requests[0] == PRIMITIVE.request("probe")
        await asyncio.sleep(0.02)
        answers = not any(start <= now() < end for start, end in self.away)
        self.record.append((now(), is_probe, answers))
        if not answers:
            raise EngineUnavailable("away")
        return await super().score(requests)


@pytest.mark.parametrize("block", range(4))
def test_the_breaker_opens_after_enough_failures_in_a_row_and_lets_only_probes_through(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        run(_outages(seed))


async def _outages(seed: int) -> None:
    chance = random.Random(seed)
    engines = []
    for number in range(chance.choice([1, 2, 3])):
        starts = [chance.uniform(1.0, 30.0) for _ in range(chance.randrange(4))]
        engines.append(Spell([(start, start + chance.choice([0.05, 1.0, 8.0])) for start in starts], f"e{number}"))
    simulated = Simulated(*engines, seed=seed)
    async with simulated.running():
        await simulated.send(range(400), per_second=chance.choice([10, 40]))
        while not simulated.pool.is_up:
            await asyncio.sleep(1.0)
    assert set(simulated.codes()) == {"certified"}, "an outage is nobody's fault, and nobody is escalated for it"
    for engine in engines:
        down_since: float | None = None
        changes = [(at, up) for at, name, up in simulated.changes if name == engine.name]
        for at, up in changes:
            assert up == (down_since is not None), "down and up take turns"
            before = [(is_probe, answered) for ended, is_probe, answered in engine.record if ended <= at]
            if up:
                assert before[-1] == (True, True), "a probe readmits it"
                tickets = [end for end, is_probe, _ in engine.record if down_since < end < at and not is_probe]  # type: ignore[operator]
                assert all(end - down_since < 0.05 for end in tickets), "only calls under way at the time"  # type: ignore[operator]
            else:
                last = [answered for _, answered in before[-Health().failures_to_open :]]
                by_suspicion = before[-1] == (True, False)
                assert not any(last) or by_suspicion, "so many failures in a row, or a probe upon suspicion"
            down_since = None if up else at


def test_one_failure_less_than_enough_is_no_outage_however_often_it_happens() -> None:
    async def main() -> None:
        engine = PlannedEngine()
        failures = 0

        def script(_: Sequence[ScoreRequest]) -> None:
            nonlocal failures
            failures += 1
            if failures % Health().failures_to_open:
                raise EngineUnavailable("four in a row, then an answer")

        engine.script = script
        simulated = Simulated(engine, batch_items=1, concurrency=1, patience=Patience(attempts=10, deadline_s=1e6))
        for number in range(200):
            await simulated.send([number], per_second=1)
        assert simulated.changes == []
        assert set(simulated.codes()) == {"certified"}

    run(main())


def test_an_outage_of_minutes_escalates_nobody_and_the_engine_is_given_work_slowly_when_it_is_back() -> None:
    async def main() -> None:
        engine = Spell([(20.0, 200.0)])
        most_at_once: list[tuple[float, int]] = []
        engine.script = lambda _: most_at_once.append((now(), engine.in_flight))
        simulated = Simulated(engine, batch_items=1, health=Health(concurrency=16))
        async with simulated.running():
            await simulated.send(range(3_000), per_second=100)
        assert set(simulated.codes()) == {"certified"}
        (down, up) = simulated.changes
        assert (down[2], up[2]) == (False, True)
        assert 20.0 < down[0] < 22.0, "known within seconds"
        assert 200.0 <= up[0] < 200.0 + Health().probe_interval_s + 0.1
        during = [is_probe for at, is_probe, _ in engine.record if down[0] + 0.05 < at < up[0]]
        assert all(during), "probes only"
        assert len(during) <= 180 / Health().probe_interval_s + 1
        back = [in_flight for at, in_flight in most_at_once if at > up[0]]
        assert back[0] == 1
        assert max(back[:5]) <= 3, "256 waiting tickets are not let loose at once"
        assert max(back) > 8, "and soon it has all the work again"

    run(main())


# -- the limiter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_is_four_times_slower_for_a_while_is_kept_near_the_latency_target_and_busy(seed: int) -> None:
    """Eight calls at once take 0.2 s, more take proportionally longer, and from the 20th to the 50th second four times
    as long: less than comes in."""
    slow_from, slow_until, capacity = 20.0, 50.0, 8 / 0.8

    def latencies(health: Health) -> list[float]:
        async def main() -> list[float]:
            chance = random.Random(seed)

            def latency_s(at: float, in_flight: int) -> float:
                slow = 4.0 if slow_from <= at < slow_until else 1.0
                return 0.2 * slow * max(1.0, in_flight / 8) * chance.uniform(0.8, 1.25)

            engine = PlannedEngine(seed=seed, latency_s=latency_s)
            simulated = Simulated(engine, seed=seed, health=health, batch_items=1, concurrency=64)
            async with simulated.running():
                await simulated.send(range(2_000), per_second=30)
            assert simulated.changes == [], "slow is not down"
            assert set(simulated.codes()) == {"certified"}
            return [took for began, took in engine.latencies if slow_from <= began < slow_until]

        return run(main())

    limited = latencies(Health(concurrency=64))
    assert percentile(limited, 0.99) < 2 * LATENCY_TARGET_S
    assert len(limited) > 0.7 * capacity * (slow_until - slow_from)
    assert percentile(latencies(Health(concurrency=64, latency_target_s=1e9)), 0.99) > 3 * LATENCY_TARGET_S


def test_the_limit_stays_within_its_bounds_and_finds_back_whatever_the_engine_does() -> None:
    for seed in range(2_000):
        chance = random.Random(seed)
        most, target_s = chance.choice([1, 4, 16, 64, 256]), chance.choice([0.1, 2.0])
        limit = ConcurrencyLimit(most, target_s)
        for _ in range(chance.randrange(200)):
            kind = chance.random()
            if kind < 0.1:
                limit.refused()
            elif kind < 0.12:
                limit.start_slowly()
            else:
                limit.answered(chance.choice([0.0, 1e-9, 0.01, 1.0, 1e3, 1e9]), chance.randrange(1, most + 1))
            assert 1 <= limit.limit <= most
        for _ in range(3_000 if seed < 50 else 0):
            limit.answered(target_s / 4, limit.limit)
        assert seed >= 50 or limit.limit == most


# -- the retry budget --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_with_30_per_cent_failures_retries_stay_within_a_tenth_of_the_requests_and_the_trickle(seed: int) -> None:
    async def main() -> None:
        engine = PlannedEngine(seed=seed, fails=lambda at: 0.3)
        simulated = Simulated(engine, seed=seed, batch_items=1, batch_wait_s=0.0)
        began = now()
        async with simulated.running():
            await simulated.send(range(2_000), per_second=400)
        retries = engine.tickets - 2_000
        trickle = 20.0 * (now() - began) + 10
        probes = sum(call == ["probe"] for call in engine.calls)
        assert retries - probes <= 0.1 * 2_000 + trickle
        assert retries > 200, "they are used, too"
        assert set(simulated.codes()) <= {"certified", "engine_unavailable"}
        escalated = simulated.codes()["engine_unavailable"]
        assert escalated < 0.05 * 2_000, "three failures in a row: 0.3 to the third"

    run(main())


def test_whoever_waits_as_long_as_the_budget_says_gets_a_retry_in_the_end() -> None:
    for seed in range(500):
        chance = random.Random(seed)
        time_s = [chance.uniform(0, 1e6)]
        budget = RetryBudget(lambda: time_s[0])  # noqa: B023 - called within this round only
        asked = 0
        for _ in range(40):
            while wait_s := budget.wait_s():
                time_s[0] += wait_s
                asked += 1
                assert asked < 1_000, "what is left to wait for is too short to move the clock"


def test_the_budget_is_a_tenth_whatever_the_pattern() -> None:
    time_s = [0.0]
    for seed in range(500):
        chance = random.Random(seed)
        time_s[0] = 0.0
        budget = RetryBudget(lambda: time_s[0])
        first = retries = 0
        for _ in range(500):
            if chance.random() < 0.5:
                budget.first_attempt()
                first += 1
            elif budget.wait_s() == 0.0:
                retries += 1
            time_s[0] += chance.choice([0.0, 0.0, 0.001, 0.5])
            assert retries <= 0.1 * first + 20.0 * time_s[0] + 10
