"""Canaries: rows in another order are noticed, and nothing is believed that could be one of them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import pytest

from tests.runtime.engines import ScriptedEngine
from tests.runtime.simulation import PRIMITIVE, PlannedEngine, Simulated, now
from tests.runtime.virtual_time import run
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineUnavailable, InvalidAnswer
from worker.runtime.canary import Canaries, MixedUp, RowWatch, distance, find_canaries, shares

TEXTS = ["label 0 known", "label 1 known", "label 2 known"]


class Bench:
    """One watched engine, a clock that is set by hand, and what was reported."""

    def __init__(self, seed: int = 0) -> None:
        self.engine = ScriptedEngine()
        self.chance = random.Random(seed)
        self.now = 0.0
        self.checks: list[bool] = []
        self.watch = RowWatch(self.engine, lambda: self.now, lambda in_order, _: self.checks.append(in_order))

    async def ready(self, **options: float) -> Bench:
        known = await find_canaries(PRIMITIVE, TEXTS, self.engine)
        self.watch.canaries = Canaries(known, self.chance.random, **options)  # type: ignore[arg-type]
        await self.watch.check()
        self.engine.calls.clear()
        self.checks.clear()
        return self

    def reorder(self, order: Callable[[list[LabelScores]], list[LabelScores]]) -> None:
        """Of every answer from now on."""
        score = self.engine.score

        async def mixed(requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            return order(list(await ScriptedEngine.score(self.engine, requests)))

        self.engine.score = mixed if order is not list else score  # type: ignore[method-assign]


def tickets(count: int = 6) -> list[ScoreRequest]:
    return [PRIMITIVE.request(f"label {n % 3} {n}") for n in range(count)]


def best(rows: Sequence[LabelScores]) -> list[int]:
    return [row.best_known for row in rows]


async def test_up_to_three_tickets_with_clearly_different_scores_are_found_and_asked_about_alone() -> None:
    engine = ScriptedEngine()
    known = await find_canaries(PRIMITIVE, [TEXTS[0], "label 0 like it", *TEXTS[1:], "label 0 more"], engine)
    assert [canary.request for canary in known] == [PRIMITIVE.request(text) for text in TEXTS]
    assert distance(known[0].known, known[1].known) > 0.8
    assert all(len(call) == 1 for call in engine.calls)


async def test_a_model_that_answers_everything_alike_has_none_and_so_no_false_alarm() -> None:
    assert await find_canaries(PRIMITIVE, ["label 0 a", "label 0 b", "label 0 c"], ScriptedEngine()) == ()


async def test_scores_that_do_not_stay_what_they_are_make_no_canary() -> None:
    chance = random.Random(1)

    class Restless(ScriptedEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            shuffled = []
            for row in await super().score(requests):
                values = list(row.logprobs)
                chance.shuffle(values)
                shuffled.append(LabelScores(tuple(values), row.mass))
            return shuffled

    for _ in range(20):
        for canary in await find_canaries(PRIMITIVE, TEXTS, Restless()):
            # Found only where the engine happened to say the same twice.
            assert canary.known.best_known in range(3)
    broken = ScriptedEngine(lambda _: (_ for _ in ()).throw(InvalidAnswer("nonsense")))
    assert await find_canaries(PRIMITIVE, TEXTS, broken) == ()


async def test_an_engine_that_is_away_is_no_model_without_canaries() -> None:
    away = ScriptedEngine(lambda _: (_ for _ in ()).throw(EngineUnavailable("away")))
    with pytest.raises(EngineUnavailable):
        await find_canaries(PRIMITIVE, TEXTS, away)


async def test_one_batch_in_sixteen_carries_them_at_random_places_and_the_caller_sees_its_own_rows_only() -> None:
    bench = await Bench().ready()
    for _ in range(160):
        assert best(await bench.watch.score(tickets())) == [0, 1, 2, 0, 1, 2]
    carrying = [call for call in bench.engine.calls if len(call) > 6]
    assert len(carrying) == 10
    assert all(len(call) == 9 for call in carrying)
    known = {bench.watch.canaries.known[n].request.item for n in range(3)}  # type: ignore[union-attr]
    assert len({tuple(n for n, item in enumerate(call) if item in known) for call in carrying}) > 5
    assert bench.checks == [True] * 10


async def test_where_calls_are_seldom_the_next_one_after_half_a_minute_carries_them() -> None:
    bench = await Bench().ready()
    for _ in range(10):
        bench.now += 16.0
        await bench.watch.score(tickets())
    assert [len(call) for call in bench.engine.calls] == [6, 9] * 5


async def test_what_cannot_be_mixed_up_or_asks_something_else_carries_none() -> None:
    bench = await Bench().ready(every_calls=1)
    await bench.watch.score(tickets(1))
    await bench.watch.score(
        [ScoreRequest("another question", "a", (1, 2, 3)), ScoreRequest("another question", "b", (1, 2, 3))]
    )
    assert [len(call) for call in bench.engine.calls] == [1, 2]


@pytest.mark.parametrize(
    "order",
    [
        lambda rows: rows[::-1],
        lambda rows: rows[1:] + rows[:1],
        lambda rows: [rows[0]] * len(rows),
        lambda rows: [*rows[:-2], rows[-1], rows[-2]],
    ],
    ids=["reversed", "rotated", "one row for all", "last two swapped"],
)
async def test_rows_in_another_order_are_noticed_and_none_of_that_answer_is_believed(
    order: Callable[[list[LabelScores]], list[LabelScores]],
) -> None:
    noticed = 0
    for seed in range(50):
        bench = await Bench(seed).ready(every_calls=1)
        bench.reorder(order)
        for call in range(30):
            try:
                await bench.watch.score(tickets())
            except MixedUp:
                noticed += 1
                break
            assert call < 29, "30 answers in a row with mixed up rows went through"
        assert bench.watch.alarm is not None
    assert noticed == 50


async def test_after_an_alarm_every_answer_has_to_prove_itself_until_it_was_right_for_a_while() -> None:
    bench = await Bench().ready()
    bench.reorder(lambda rows: rows[::-1])
    with pytest.raises(MixedUp, match="another's"):
        await bench.watch.check()
    bench.watch._engine = bench.engine = ScriptedEngine()
    for number in range(6):
        bench.now += 50.0
        assert bench.watch.alarm is not None
        assert bench.watch.is_overdue
        await bench.watch.score(tickets(1 if number % 2 else 6))
    assert bench.watch.alarm is None
    # A ticket that is alone is asked about alone, after a check: in company the engine could not say what is wrong.
    assert [len(call) for call in bench.engine.calls] == [9, 3, 1] * 3
    await bench.watch.score(tickets())
    assert len(bench.engine.calls[-1]) == 6


async def test_answers_that_were_under_way_when_the_alarm_came_are_not_believed() -> None:
    bench = await Bench().ready()
    gate = asyncio.Event()

    class Slow(ScriptedEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            if len(requests) == 6:
                await gate.wait()
            return list(await super().score(requests))[::-1]

    bench.watch._engine = Slow()
    under_way = asyncio.create_task(bench.watch.score(tickets()))
    await asyncio.sleep(0)
    with pytest.raises(MixedUp):
        await bench.watch.check()
    gate.set()
    with pytest.raises(MixedUp, match="meanwhile"):
        await under_way


def test_the_wobble_of_an_engine_is_no_alarm() -> None:
    chance = random.Random(5)

    class Wobbling(PlannedEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            rows = await super().score(requests)
            return [_moved(row, chance) for row in rows]

    def _moved(row: LabelScores, chance: random.Random) -> LabelScores:
        moved = [max(1e-6, share + chance.uniform(-0.02, 0.02)) for share in shares(row)]
        return LabelScores.from_logprobs(tuple(math.log(share / sum(moved)) for share in moved))

    async def main() -> None:
        engine = Wobbling()
        simulated = Simulated(engine)
        await simulated.watch_rows(engine)
        async with simulated.running():
            await simulated.send(range(8_000), per_second=200)
        assert simulated.checks[True] > 50
        assert simulated.checks[False] == 0

    run(main())


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_from_the_alarm_on_next_to_no_ticket_is_routed_by_a_row_that_is_not_its_own(seed: int, share: float) -> None:
    """An engine mixes up rows from the 20th to the 80th second: all, or a third of its answers."""

    async def main() -> None:
        engine = PlannedEngine(seed=seed, mixes=lambda at: share if 20.0 <= at < 80.0 else 0.0)
        simulated = Simulated(engine, seed=seed, batch_wait_s=0.03)
        await simulated.watch_rows(engine)
        async with simulated.running():
            await simulated.send(range(5_000), per_second=60)
            assert simulated.pool.alarm is not None
            await asyncio.sleep(450.0 - now())
        (alarm_at, _) = next(alarm for alarm in simulated.alarms if alarm[1] is not None)
        assert 20.0 < alarm_at < 40.0, "an alarm within a minute"
        late = [n for n in simulated.wrong() if simulated.ends[n][0] > alarm_at]
        # Now and then every canary meets a row like its own. Without canaries it would be hundreds.
        assert len(late) <= 40
        assert simulated.alarms[-1][1] is None, "it is trusted again after five minutes"
        assert set(simulated.codes()) <= {"certified", "invalid_answer", "engine_unavailable"}
        assert simulated.pool.is_up
        decided_in_the_end = [routed for at, routed in simulated.ends.values() if at > 120.0]
        assert all(routed.decision.action == "route" for routed in decided_in_the_end)

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_with_two_engines_the_one_in_order_does_the_work(seed: int) -> None:
    async def main() -> None:
        bad, good = PlannedEngine(seed=seed, mixes=lambda at: float(at > 5.0)), PlannedEngine()
        simulated = Simulated(bad, good, seed=seed, batch_wait_s=0.03)
        await simulated.watch_rows(good)
        async with simulated.running():
            await simulated.send(range(4_000), per_second=100)
        assert simulated.changes[0][1:] == ("e0", False)
        assert simulated.changes[0][0] < 20.0
        assert simulated.pool.outages == 0
        assert "e0" in (simulated.pool.alarm or "")
        assert set(simulated.codes()) == {"certified"}

    run(main())


def test_an_idle_worker_notices_too() -> None:
    class Reversing(PlannedEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            rows = list(await super().score(requests))
            return rows[::-1] if now() > 100.0 else rows

    async def main() -> None:
        engine = Reversing()
        simulated = Simulated(engine)
        await simulated.watch_rows(engine)
        async with simulated.running():
            await asyncio.sleep(100.0)
            assert simulated.pool.alarm is None
            assert simulated.checks[True] >= 2
            while simulated.pool.is_up:
                await asyncio.sleep(1.0)
            assert now() < 160.0

    run(main())
