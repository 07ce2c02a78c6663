"""Command line of the benchmarks: `python -m tests.bench [--short] [--parts a,b,...] [--out FOLDER]`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench import cache, engine, memory, pipeline, profile, saturation, sizing, slow, stages, whole
from tests.bench.ground import ROOT, apache_broker, collector
from tests.bench.others.environment import python_of_others
from tests.bench.report import Results
from tests.bench.tickets import ticket_bytes
from tests.bench.watch import StoodStill
from tests.integration.desk import StubProcess
from tests.servers.kafka import ApacheKafka
from tests.servers.redis_server import redis_server
from worker.errors import RouterError
from worker.settings import Settings

PARTS = ("pipeline", "whole", "cache", "engine", "saturation", "slow", "stages", "sizing", "memory")
NOT_IN_SHORT = {"sizing"}
ON_DEMAND = ("profile",)
RULES = ROOT / "routing_rules" / "helpdesk"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    pipeline_tickets: int
    whole_tickets: int
    case_s: float
    latencies_s: tuple[float, ...]
    items: tuple[int, ...]
    cache_rounds: int
    concurrencies: tuple[int, ...]
    engine_s: float
    saturation_s: float
    slow_s: float
    rounds: int
    ruled: int
    scored: int


FULL = Size(
    pipeline_tickets=300_000,
    whole_tickets=200_000,
    case_s=20.0,
    latencies_s=whole.LATENCIES_S,
    items=whole.ITEMS,
    cache_rounds=2_000,
    concurrencies=(1, 4, 8, 16, 32),
    engine_s=10.0,
    saturation_s=20.0,
    slow_s=30.0,
    rounds=20_000,
    ruled=1_000_000,
    scored=200_000,
)
SHORT = Size(
    pipeline_tickets=120_000,
    whole_tickets=80_000,
    case_s=3.0,
    latencies_s=(0.02,),
    items=(1, 32),
    cache_rounds=200,
    concurrencies=(1, 8),
    engine_s=1.0,
    saturation_s=5.0,
    slow_s=8.0,
    rounds=2_000,
    ruled=50_000,
    scored=0,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--short", action="store_true", help="less than three minutes, and less exact")
    parser.add_argument("--parts", help=f"some of {', '.join((*PARTS, *ON_DEMAND))}; by default all but the last")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="where results.json and the plot go")
    parser.add_argument("--engine", default="llama_cpp", help="what part `engine` asks; ROUTER_ENGINE's values")
    parser.add_argument("--engine-url", help="of a live server, for part `engine`")
    given = parser.parse_args()
    every = [part for part in PARTS if not (given.short and part in NOT_IN_SHORT)]
    parts = [part.strip() for part in given.parts.split(",")] if given.parts else every
    if unknown := set(parts) - {*PARTS, *ON_DEMAND}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    results = Results(given.short)
    failed = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the servers end with it
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _ground(Path(folder)) as ground:
        for part in parts:
            began = time.monotonic()
            try:
                run_part(part, ground, SHORT if given.short else FULL, results, given.engine, given.engine_url)
            except (RouterError, StoodStill, OSError) as error:
                failed = True
                print(f"{part}: {error}", file=sys.stderr)
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "results.json").write_bytes(results.to_json())  # whatever becomes of the next part
            print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(results.tables())
    results.plot(given.out / "costs.png")
    print(f"\nresults.json and costs.png are in {given.out}")
    return int(failed)


class Ground:
    """Servers that parts share, each started by the first that asks for it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._stub: StubProcess | None = None
        self._collector: str | None = None
        self._redis: str | None = None
        self._bench: whole.Bench | None = None

    @property
    def stub(self) -> StubProcess:
        if self._stub is None:
            self._stub = self._stack.enter_context(StubProcess(latency_s=0.0))
            self._stub.tell(quick=True)  # it shares the machine with whoever is measured
        return self._stub

    @property
    def collector(self) -> str:
        if self._collector is None:
            self._collector = self._stack.enter_context(collector())
        return self._collector

    @property
    def redis(self) -> str:
        if self._redis is None:
            self._redis = self._stack.enter_context(redis_server())
        return self._redis

    def bench(self, tickets: int) -> whole.Bench:
        """On Apache Kafka, with so many tickets in its input topic."""
        if self._bench is None:
            home = self.folder / "kafka"
            home.mkdir()
            kafka = self._stack.enter_context(ApacheKafka(home))
            broker = apache_broker(kafka.bootstrap_servers)
            self._bench = whole.Bench(self.folder, broker, self.stub, self.redis, self.collector)
            broker.fill(pipeline.INPUT, ticket_bytes(tickets))
        return self._bench


@contextmanager
def _ground(folder: Path) -> Iterator[Ground]:
    with ExitStack() as stack:
        yield Ground(folder, stack)


def run_part(part: str, on: Ground, size: Size, results: Results, engine_name: str, engine_url: str | None) -> None:
    """Runs one part and adds what it found."""
    if part == "pipeline":
        others = python_of_others(install=True)
        results.pipeline = pipeline.run(
            on.folder, on.stub.url, on.collector, size.pipeline_tickets, size.case_s, others
        )
    elif part == "whole":
        bench = on.bench(size.whole_tickets)
        results.whole = whole.run(bench, size.whole_tickets, size.case_s, size.latencies_s, size.items)
    elif part == "cache":
        results.cache = asyncio.run(cache.run(on.redis, size.cache_rounds))
    elif part == "engine":
        settings = Settings(engine=engine_name, engine_url=engine_url, engine_threads=1)
        results.engine_name = engine_url or "the embedded Gemma 3 270M on one thread"
        results.engine = asyncio.run(engine.run(settings, RULES, size.concurrencies, size.engine_s))
    elif part == "saturation":
        results.saturation = saturation.run(on.bench(size.whole_tickets), size.saturation_s)
    elif part == "slow":
        results.slow = slow.run(on.bench(size.whole_tickets), size.slow_s)
    elif part == "stages":
        results.stages = stages.run(on.collector, size.rounds)
    elif part == "sizing":
        results.sizing = sizing.run(on.bench(size.whole_tickets), size.case_s / 2, sizing.CATEGORIES, sizing.CHARACTERS)
    elif part == "profile":
        results.profile = profile.run(on.bench(size.whole_tickets), size.case_s)
    elif part == "memory":
        for tickets, scored in ((size.ruled, False), (size.scored, True)):
            if tickets:
                grown = memory.run(on.folder, on.stub.url, on.collector, tickets, scored=scored)
                results.memory = [*results.memory, grown]


if __name__ == "__main__":
    sys.exit(main())
