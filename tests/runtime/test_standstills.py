"""Worker: while it consumes nothing it is not ready; health port, log and metrics say which partition is to blame."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence

import orjson
import pytest
from structlog.testing import capture_logs

from tests.runtime.desks import RULES, broker, ends, make_worker, send
from tests.runtime.engines import ScriptedEngine
from tests.waiting import until
from worker.adapters.memory import MemoryBroker, MemoryStream
from worker.errors import EngineUnavailable, StreamRetriable
from worker.ports import Delivery, Partition, Settled, Settlement
from worker.runtime.http import HealthServer
from worker.runtime.loop import Limits, Worker
from worker.runtime.service import running
from worker.telemetry import Metrics

LIMITS = Limits(
    max_in_flight=8,
    settle_interval_s=0.01,
    drain_s=1.0,
    revoke_s=0.1,
    stalled_s=1.5,  # above the second after which the lag is looked at again
    unassigned_s=0.5,
    ticket_deadline_s=0.5,
)
STUCK = Partition(RULES.input_topic, 1)


async def often(seconds: float) -> None:
    """Sleep for the watch and the probes, fifty times as fast."""
    await asyncio.sleep(seconds / 50)


class Faulty(MemoryStream):
    """Like a broker where a transaction on one partition hangs, or whose coordinator does not let offsets in."""

    def __init__(self, on: MemoryBroker) -> None:
        super().__init__(on, RULES.input_topic)
        self.holds_back: Partition | None = None
        self.settles = True
        self.returns = threading.Event()
        self.returns.set()

    def _take(self, max_records: int) -> list[Delivery]:
        held = self._positions.get(self.holds_back) if self.holds_back is not None else None
        taken = super()._take(max_records)
        if held is not None and self.holds_back is not None:
            self._positions[self.holds_back] = held
        return [delivery for delivery in taken if delivery.partition != self.holds_back]

    def settle(self, settlement: Settlement) -> Settled:
        self.returns.wait()
        if not self.settles:
            raise StreamRetriable("the coordinator does not answer")
        return super().settle(settlement)


def make(on: MemoryBroker, stream: MemoryStream, engine: ScriptedEngine | None = None, **options: object) -> Worker:
    return make_worker(on, engine or ScriptedEngine(), limits=LIMITS, stream=stream, sleep=often, **options)  # type: ignore[arg-type]


async def stays_ready(worker: Worker, seconds: float = 3.0) -> None:
    until_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until_s:
        assert worker.status().standstills == ()
        await asyncio.sleep(0.02)


def sentences(worker: Worker) -> list[str]:
    return [each.sentence for each in worker.status().standstills]


async def test_a_partition_whose_messages_do_not_come_is_named_on_every_channel_until_they_come() -> None:
    on, metrics = broker(partitions=3), Metrics()
    stream = Faulty(on)
    stream.holds_back = STUCK
    ids = send(on, 30)
    worker = make(on, stream, metrics=metrics)
    health = HealthServer(worker.status, lambda: None, metrics.prometheus)
    port = await health.start("127.0.0.1", 0)
    try:
        with capture_logs() as lines:
            async with running(worker):
                await until(lambda: bool(worker.status().standstills))
                await until(lambda: worker.status().lags[f"{STUCK.topic}/0"] == 0)
                assert not worker.status().ready
                code, text = await get(port, "/readyz")
                assert code == 503
                assert f"partition {STUCK.topic}/1" in text
                assert "messages wait" in text
                shown = orjson.loads((await get(port, "/status"))[1])
                assert [sentence.split(":")[0] for sentence in shown["standstills"]] == [f"partition {STUCK.topic}/1"]
                assert shown["lags"][f"{STUCK.topic}/1"] > 0
                await asyncio.sleep(0.3)
                stream.holds_back = None
                await until(lambda: worker.status().settled == 30)
                await until(lambda: worker.status().ready)
                assert (await get(port, "/readyz"))[0] == 200
        told = [(line["event"], line.get("what")) for line in lines if line["event"].startswith("worker.")]
        assert told == [("worker.standstill", "intake"), ("worker.moving_again", "intake")]
        assert all(ends(on)[i] for i in ids)
    finally:
        await health.aclose()


async def test_a_settlement_that_fails_for_ever_is_named_although_the_worker_is_full_and_paused() -> None:
    on, metrics = broker(partitions=1), Metrics()
    stream = Faulty(on)
    stream.settles = False
    ids = send(on, 50)
    worker = make(on, stream, metrics=metrics)
    make_gauges(worker, metrics)
    async with running(worker):
        await until(lambda: "could not be settled" in "".join(sentences(worker)))
        assert worker.status().in_flight == LIMITS.max_in_flight
        assert 'ticket_router_standstills{what="settling"} 1\n' in metrics.prometheus()
        assert 'ticket_router_standstills{what="intake"} 0\n' in metrics.prometheus()
        stream.settles = True
        await until(lambda: worker.status().settled == 50)
        await until(lambda: worker.status().ready)
    assert all(ends(on)[i] for i in ids)


async def test_a_call_of_the_client_that_does_not_return_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.watchdog.CLIENT_S", 0.5)
    on = broker(partitions=1)
    stream = Faulty(on)
    worker = make(on, stream)
    async with running(worker):
        await until(lambda: worker.status().ready)
        stream.returns.clear()
        send(on, 3)
        await until(lambda: "has not come back" in "".join(sentences(worker)))
        assert not worker.status().ready
        stream.returns.set()
        await until(lambda: worker.status().ready)


async def test_a_worker_that_gets_no_partition_says_why_that_may_be_and_gets_ready_when_it_gets_one() -> None:
    on = broker(partitions=1)
    first, second = make(on, Faulty(on)), make(on, Faulty(on))
    async with running(first):
        await until(lambda: first.status().ready)
        async with running(second):
            await until(lambda: "more workers than" in "".join(sentences(second)))
            assert not second.status().ready
            assert first.status().ready
            first.stop()
            await until(lambda: second.status().ready)


async def test_an_idle_worker_stays_ready() -> None:
    on = broker(partitions=3)
    worker = make(on, Faulty(on))
    async with running(worker):
        await until(lambda: worker.status().ready)
        await stays_ready(worker)


async def test_an_engine_that_is_down_for_long_is_no_standstill_and_a_slow_one_neither() -> None:
    on = broker(partitions=1)
    send(on, 100)
    down = [True]

    def script(_: Sequence[object]) -> None:
        if down[0]:
            raise EngineUnavailable("refused")

    engine = ScriptedEngine(script, delay_s=0.2)
    worker = make(on, Faulty(on), engine)
    async with running(worker):
        await until(lambda: not worker.status().engine_up)
        await stays_ready(worker)
        assert worker.status().why_not() == "engine is down, tickets wait: one: refused"
        down[0] = False
        await until(lambda: worker.status().engine_up)
        await stays_ready(worker)


async def test_a_worker_that_drains_owes_nothing() -> None:
    on = broker(partitions=1)
    stream = Faulty(on)
    send(on, 3)
    worker = make(on, stream, ScriptedEngine(delay_s=60))
    async with running(worker):
        await until(lambda: worker.status().in_flight == 3)
        worker.stop()
        await stays_ready(worker, 0.9)


def make_gauges(worker: Worker, metrics: Metrics) -> None:
    worker._journal.watch(worker.status, lambda: True)


async def get(port: int, path: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(ask)
