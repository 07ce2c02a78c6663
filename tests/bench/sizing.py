"""What a ticket costs the worker by its length and by the number of categories: how many workers does it take?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.tickets import SURE, ticket_bytes
from tests.bench.watch import Cost, cost_of, watch
from tests.bench.whole import SETTLE_S, Bench

CATEGORIES = (5, 20, 100)
CHARACTERS = (200, 2_000, 20_000)
ITEMS = 32
LATENCY_S = 0.02
LONG = 10_000
"""Characters."""
INPUT_BYTES = 60_000_000


@dataclass(frozen=True, slots=True)
class Sized:
    """Of the whole worker, exactly once, 32 items a request, every ticket another."""

    categories: int
    characters: int
    cost: Cost


def run(bench: Bench, at_most_s: float, categories: Sequence[int], characters: Sequence[int]) -> list[Sized]:
    """With an engine of 20 ms. A ticket of 20,000 characters is counted in the engine's tokens and cut to 2,000."""
    bench.stub.tell(latency_s=LATENCY_S, keywords=SURE)
    rows = []
    for length in characters:
        topic = f"bench-{length}-characters"
        total = bench.broker.fill(topic, ticket_bytes(min(60_000, INPUT_BYTES // length), characters=length))
        for count in categories:
            names = [f"category{number}" for number in range(count)]
            is_long = length >= LONG
            # What is in flight at the ends of the time must be little beside what is settled in it.
            with bench.worker(topic, names, batch_items=ITEMS, max_in_flight=128 if is_long else 1_024) as worker:
                time_s = at_most_s * (2 if is_long else 1)
                sights = watch(worker.process.pid, worker.settled, total, at_most_s=time_s, settle_s=SETTLE_S)
            rows.append(Sized(count, length, cost_of(sights)))
    bench.stub.tell(latency_s=0.0)
    return rows
