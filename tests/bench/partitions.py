"""What a ticket costs the worker by the number of partitions of its topics: `python -m tests.bench.partitions`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench.__main__ import Ground
from tests.bench.ground import Broker
from tests.bench.tickets import ticket_bytes
from tests.bench.watch import Cost
from tests.bench.whole import Bench, Case
from tests.servers.kafka import ApacheKafka
from worker.adapters.kafka_client import KafkaConfig
from worker.adapters.kafka_topics import create_topics

PARTITIONS = (1, 6, 24, 96)
TICKETS = 40_000
LATENCY_S = 0.02
ITEMS = 32


@dataclass(frozen=True, slots=True)
class Row:
    partitions: int
    case: Case

    @property
    def cost(self) -> Cost:
        return self.case.cost


def measure(partitions: Sequence[int], tickets: int, at_most_s: float) -> list[Row]:
    """One worker, exactly once, on one node of Apache Kafka, with an engine of 20 ms. Every topic has so many."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ground = Ground(Path(folder), stack)
        home = Path(folder) / "brokers"
        home.mkdir()
        servers = stack.enter_context(ApacheKafka(home)).bootstrap_servers
        config = KafkaConfig(servers, "any", "bench")
        for count in partitions:
            broker = Broker(
                "Apache Kafka", servers, count, lambda topic, count=count: create_topics(config, {topic: count})
            )
            topic = f"bench-{count}-partitions"
            broker.fill(topic, ticket_bytes(tickets))
            place = Path(folder) / f"p{count}"
            place.mkdir()
            bench = Bench(place, broker, ground.stub, ground.redis, ground.collector)
            rows.append(Row(count, bench.case(topic, tickets, LATENCY_S, ITEMS, at_most_s)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    print("| partitions | CPU us of a ticket | tickets a second here | a settlement takes |\n" + "|---" * 4 + "|")
    for row in measure(PARTITIONS, TICKETS, parser.parse_args().seconds):
        cost = row.cost
        print(f"| {row.partitions} | {cost.cpu_us:.0f} | {cost.per_second:,.0f} | {row.case.settle_ms:.0f} ms |")


if __name__ == "__main__":
    main()
