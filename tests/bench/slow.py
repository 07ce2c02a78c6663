"""An engine that turns four times slower for a while, and then has less to give than comes in: how long do its calls
take, and tickets?"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from statistics import quantiles

import orjson

from tests.bench.tickets import ticket_bytes
from tests.bench.whole import Bench
from worker.adapters.topic_log import TopicReader, TopicWriter
from worker.ports import Output
from worker.runtime.endpoints import Health

TOPIC = "bench-slow"
SLOTS = 4
LATENCY_S = 0.02
LATENCY_PER_ITEM_S = 0.005
ITEMS = 32
CONCURRENCY = 64
"""So many calls at once, if the worker let them, would wait sixteen turns."""
PER_SECOND = 400
TIMES = 4.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Milliseconds at the engine for its calls, and from being taken in to being decided for tickets."""

    name: str
    calls: int
    items_per_call: float
    call_p50_ms: float
    call_p99_ms: float
    tickets: int
    ticket_p50_ms: float
    ticket_p99_ms: float


@dataclass(frozen=True, slots=True)
class Slowdown:
    """`possible` counts tickets a second that the slow engine could do in full calls."""

    target_ms: float
    seconds: float
    possible: float
    per_second: float
    """Tickets that it did answer while it was slow."""
    phases: Sequence[Phase]


def run(bench: Bench, seconds: float, quiet_s: float = 5.0) -> Slowdown:
    """`quiet_s` before and after. Tickets come at the same rate before, during and after."""
    stub = bench.stub
    before = {"latency_s": LATENCY_S, "latency_per_item_s": LATENCY_PER_ITEM_S}
    stub.tell(**before, slots=SLOTS, timed=True)
    bench.broker.create(TOPIC)
    stop = threading.Event()
    spans: list[tuple[str, float, float]] = []
    calls: list[tuple[list[float], list[int]]] = []
    try:
        with (
            bench.worker(
                TOPIC, batch_items=ITEMS, batch_concurrency=CONCURRENCY, engine_connections=CONCURRENCY
            ) as worker,
            ThreadPoolExecutor(1) as pool,
        ):
            feeding = pool.submit(_feed, bench.broker.bootstrap_servers, stop)
            try:
                while not worker.settled():
                    time.sleep(0.1)
                slow = {name: value * TIMES for name, value in before.items()}
                for name, behaviour, span_s in (
                    ("before", before, quiet_s),
                    ("four times slower", slow, seconds),
                    ("after", before, quiet_s),
                ):
                    stub.tell(**behaviour)
                    since, began = stub.tell()["counters"], time.time()
                    time.sleep(span_s)
                    until = stub.tell()["counters"]
                    spans.append((name, began, time.time()))
                    calls.append(
                        (
                            until["taken_s"][len(since["taken_s"]) :],
                            until["items_per_request"][len(since["items_per_request"]) :],
                        )
                    )
            finally:
                stop.set()
            feeding.result()
            decided = list(_decided(bench.broker.bootstrap_servers, worker.folder.rules.decisions_topic))
    finally:
        stub.tell(latency_s=0.0, latency_per_item_s=0.0, slots=None, timed=False)
    phases = [
        _phase(name, *found, [took for at, took in decided if began <= at < ended])
        for (name, began, ended), found in zip(spans, calls, strict=True)
    ]
    possible = SLOTS * ITEMS / (TIMES * (LATENCY_S + ITEMS * LATENCY_PER_ITEM_S))
    return Slowdown(Health().latency_target_s * 1e3, seconds, possible, phases[1].tickets / seconds, phases)


def _feed(bootstrap_servers: str, stop: threading.Event) -> None:
    writer = TopicWriter(bootstrap_servers)
    began = time.monotonic()
    written = 0
    while not stop.wait(0.02):
        due = int((time.monotonic() - began) * PER_SECOND)
        for number, value in zip(count(written), ticket_bytes(due - written, first=written), strict=False):
            writer.write(Output(TOPIC, f"k{number % 997}".encode(), value))
        written = due
    writer.flush(60)


def _decided(bootstrap_servers: str, topic: str) -> Iterator[tuple[float, float]]:
    """Unix seconds and milliseconds of every decision that was settled."""
    reader = TopicReader(bootstrap_servers)
    try:
        for record in reader.records([topic]):
            if record.value:
                yield record.timestamp_ms / 1e3, orjson.loads(record.value)["timings"]["total_ms"]
    finally:
        reader.close()


def _phase(name: str, taken_s: Sequence[float], items: Sequence[int], tickets_ms: Sequence[float]) -> Phase:
    call_p50, call_p99 = _cuts(taken_s)
    ticket_p50, ticket_p99 = _cuts(tickets_ms)
    per_call = sum(items) / max(1, len(items))
    return Phase(name, len(taken_s), per_call, call_p50 * 1e3, call_p99 * 1e3, len(tickets_ms), ticket_p50, ticket_p99)


def _cuts(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; 0 where there is nothing."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]
