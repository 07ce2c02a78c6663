"""Whether the worker's memory stays flat over many tickets: resident MiB, look by look."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.bench.ground import Broker, RuleFolder, Worker, mock_broker
from tests.bench.pipeline import INPUT
from tests.bench.tickets import ticket_bytes
from tests.bench.watch import Sight, StoodStill, watch
from worker.adapters.topic_log import TopicWriter
from worker.ports import Output

AHEAD = 12_000
"""So many tickets at most wait: the mock broker keeps some 18,000 a partition, read or not, and the client does not
read all partitions evenly."""
CHUNK = 5_000
EARLY = 0.25
"""Share of the tickets after which nothing is still being filled, such as the worker's own memory of scores."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Resident MiB after a quarter of the tickets, and the most and the last after that."""

    scored: bool
    tickets: int
    early_mib: float
    most_mib: float
    last_mib: float
    curve: tuple[tuple[int, float], ...]


def run(folder: Path, engine_url: str, collector_url: str, tickets: int, *, scored: bool) -> Growth:
    """`scored`: every ticket's text is another, and is scored; else a rule decides about each."""
    with mock_broker() as broker:
        broker.create(INPUT)
        rules = RuleFolder(folder, f"memory_{'scored' if scored else 'ruled'}", engine_url, by_field=not scored)
        rules.create_topics(broker)
        with Worker(rules, broker, engine_url, INPUT, collector_url, {"delivery": "at_least_once"}) as worker:
            stop = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                feeding = pool.submit(_feed, broker, tickets, worker.settled, stop)
                try:
                    sights = watch(worker.process.pid, worker.settled, tickets, at_most_s=3_600.0)
                except StoodStill as error:
                    stop.set()
                    raise StoodStill(f"{error}; {feeding.result()} were written\n{worker.status()}") from None
                finally:
                    stop.set()
    return _growth(sights, scored)


def _growth(sights: list[Sight], scored: bool) -> Growth:
    total = sights[-1].done
    later = [sight for sight in sights if sight.done >= EARLY * total] or sights
    step = max(1, len(sights) // 100)
    curve = tuple((sight.done, round(sight.rss_mib, 1)) for sight in sights[::step])
    return Growth(scored, total, later[0].rss_mib, max(s.rss_mib for s in later), sights[-1].rss_mib, curve)


def _feed(broker: Broker, tickets: int, settled: Callable[[], int], stop: threading.Event) -> int:
    """How many were written."""
    writer = TopicWriter(broker.bootstrap_servers)
    written = 0
    while written < tickets and not stop.is_set():
        if written - settled() > AHEAD:
            stop.wait(0.1)
            continue
        for number, value in enumerate(ticket_bytes(min(CHUNK, tickets - written), first=written), written):
            writer.write(Output(INPUT, f"k{number % 997}".encode(), value))
        written = min(tickets, written + CHUNK)
        writer.flush(60)
    return written
