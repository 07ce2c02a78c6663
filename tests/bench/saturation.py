"""How much of a saturated engine the worker gets, beside a bare load generator that knows nothing but how to ask."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import orjson

from tests.bench.pipeline import INPUT
from tests.bench.tickets import SURE, ticket_bytes
from tests.bench.whole import CONCURRENCY, Bench
from tests.integration.desk import StubProcess
from worker.adapters import sglang_wire as wire
from worker.core.normalise import canonical

SLOTS = 2
LATENCY_S = 0.2
ITEMS = 32
WARM_S = 3.0


@dataclass(frozen=True, slots=True)
class Saturation:
    """Items a second that the engine answered, of `possible`."""

    possible: float
    generator: float
    worker: float
    generator_busy: float
    worker_busy: float
    """Share of the time in which the engine had as many requests as it can work on, or more: unlike the rates, it does
    not depend on how much of the machine's CPU the engine got meanwhile."""

    @property
    def share(self) -> float:
        return self.worker / self.generator


def run(bench: Bench, seconds: float) -> Saturation:
    """`INPUT` must hold enough tickets. The engine works on two requests of 32 tickets at once, 0.2 s each."""
    bench.stub.tell(latency_s=LATENCY_S, slots=SLOTS, keywords=SURE)
    try:
        with bench.worker(INPUT, batch_items=ITEMS) as worker:
            while not worker.settled():
                time.sleep(0.1)
            time.sleep(WARM_S)
            worker_rate, worker_busy = _watched(bench.stub, seconds)
            primitive = worker.folder.question.primitive
        texts = [str(orjson.loads(value)["text"]) for value in ticket_bytes(ITEMS)]
        body = wire.score_body([primitive.request(canonical(text)) for text in texts])
        rate, busy = asyncio.run(_generate(bench.stub, body, seconds))
    finally:
        bench.stub.tell(latency_s=0.0, slots=None)
    return Saturation(SLOTS * ITEMS / LATENCY_S, rate, worker_rate, busy, worker_busy)


def _watched(stub: StubProcess, seconds: float) -> tuple[float, float]:
    """Items a second that were asked for, and the share of the time in which the engine was busy."""
    before, began = stub.tell()["counters"], time.monotonic()
    time.sleep(seconds)
    after, passed = stub.tell()["counters"], time.monotonic() - began
    return (after["items"] - before["items"]) / passed, 1 - (after["starved_s"] - before["starved_s"]) / passed


async def _generate(stub: StubProcess, body: bytes, seconds: float) -> tuple[float, float]:
    """The worker's own request, again and again."""
    until = time.monotonic() + seconds + WARM_S

    async def ask(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < until:
            async with session.post(f"{stub.url}/v1/score", data=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:
        asking = [asyncio.create_task(ask(session)) for _ in range(CONCURRENCY)]
        await asyncio.sleep(min(WARM_S, 1.0))
        found = await asyncio.to_thread(_watched, stub, seconds)
        await asyncio.gather(*asking)
        return found
