"""A ticket's deadline: it counts waiting for an engine that works, and only that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson

from tests.runtime.desks import RULES, broker, ends, make_worker
from tests.runtime.engines import ScriptedEngine
from tests.runtime.test_router import Bench, code
from tests.runtime.virtual_time import in_virtual_time
from tests.waiting import until
from worker.core.envelope import DECISION_HEADER
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineUnavailable
from worker.ports import Partition
from worker.runtime.asking import Patience
from worker.runtime.loop import Limits
from worker.runtime.service import running


class Moody(ScriptedEngine):
    """Hangs on everything while `hangs`, and for ever on items with a word in `slow_on`."""

    def __init__(self, slow_on: str = "\0", call_s: float = 0.1) -> None:
        super().__init__()
        self.hangs = False
        self.slow_on = slow_on
        self.call_s = call_s
        """The adapter's own limit for one call."""

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        if self.hangs or any(self.slow_on in request.item for request in requests):
            await asyncio.sleep(self.call_s)
            raise EngineUnavailable("no whole answer in time")
        return await super().score(requests)


async def test_one_ticket_without_answer_holds_back_its_own_partition_until_its_deadline_and_nobody_else() -> None:
    on = broker(partitions=2)
    for n in range(40):
        text = "slow one" if n == 0 else f"label {n % 3} {n}"
        on.produce(RULES.input_topic, None, orjson.dumps({"id": f"t{n}", "text": text}), partition=n % 2)
    patience = Patience(attempts=100, deadline_s=3.0, first_backoff_s=0.01, longest_backoff_s=0.05)
    limits = Limits(settle_interval_s=0.01, drain_s=5.0)
    worker = make_worker(on, Moody("slow one", call_s=0.3), patience=patience, limits=limits)
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with running(worker):
        await until(lambda: worker.status().settled >= 20)
        committed = on.committed("ticket-router")
        assert committed.get(Partition(RULES.input_topic, 0), 0) == 0, "the other partition waited for it"
        assert committed[Partition(RULES.input_topic, 1)] == 20
        await until(lambda: worker.status().settled == 40)
        assert loop.time() - started < 3.0 + 20.0
    found = ends(on)
    assert found.pop("t0") == ["desk.human"]
    assert all("desk.human" not in topics for topics in found.values())
    (slow,) = on.records("desk.human")
    assert orjson.loads(dict(slow.headers)[DECISION_HEADER] or b"")["reasons"][0]["code"] == "engine_timeout"


@in_virtual_time
async def test_waiting_for_a_place_in_the_engine_counts() -> None:
    """Whatever it waits for, the partition's commit waits with it."""
    bench = Bench(ScriptedEngine(delay_s=0.4), deadline_s=1.0)  # two calls of eight at once
    routed = await asyncio.gather(*(bench.route(f"label {n % 3} {n}") for n in range(80)))
    codes = [code(each) for each in routed]
    assert codes.count("certified") >= 16
    assert codes.count("engine_timeout") >= 16
    assert set(codes) == {"certified", "engine_timeout"}
    await bench.batcher.aclose()


@in_virtual_time
async def test_the_clock_stands_still_while_every_engine_is_down() -> None:
    engine = Moody(call_s=0.01)
    engine.hangs = True
    bench = Bench(engine, attempts=1, deadline_s=0.3)

    async def slowly(seconds: float) -> None:
        await asyncio.sleep(0.02)

    bench.pool._sleep = slowly
    routing = asyncio.create_task(bench.route())
    await asyncio.sleep(1.0)
    assert not routing.done()
    assert bench.changes == [False]
    engine.hangs = False
    assert code(await routing) == "certified"
    await bench.pool.aclose()


@in_virtual_time
async def test_an_engine_that_hangs_is_found_to_be_down_before_a_lone_ticket_is_given_up() -> None:
    engine = Moody(call_s=0.2)
    engine.hangs = True
    bench = Bench(engine, deadline_s=0.1)  # the deadline comes before even one call has failed

    async def slowly(seconds: float) -> None:
        await asyncio.sleep(0.02)

    bench.pool._sleep = slowly
    routing = asyncio.create_task(bench.route())
    await asyncio.sleep(1.0)
    assert not routing.done()
    engine.hangs = False
    assert code(await routing) == "certified"
    await bench.pool.aclose()


@in_virtual_time
async def test_a_ticket_that_hangs_the_engine_again_and_again_is_given_up() -> None:
    class Poisoned(ScriptedEngine):
        """A ticket makes it hang for a while, probes included."""

        hung_until = 0.0
        met = 0

        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            now = asyncio.get_running_loop().time()
            if any("label" in request.item for request in requests):
                self.hung_until = now + 0.6
                self.met += 1
            if now < self.hung_until:
                await asyncio.sleep(0.3)
                raise EngineUnavailable("no whole answer in time")
            return await super().score(requests)

    engine = Poisoned()
    bench = Bench(engine, deadline_s=0.1)

    async def slowly(seconds: float) -> None:
        await asyncio.sleep(0.02)

    bench.pool._sleep = slowly
    assert code(await bench.route()) == "engine_timeout"
    assert engine.met == 2
    await bench.batcher.aclose()
    await bench.pool.aclose()
