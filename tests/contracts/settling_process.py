"""A process that takes tickets and stops in the middle of its first exactly-once transaction until it is told to go on.

Arguments: bootstrap servers, input topic, group, output topic, number of tickets, and where it stops: `outputs` (before
the offsets are sent) or `offsets` (before the commit). It says `reached`, reads a line, goes on, and says how it ended:
`settled`, or the name of the error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Producer

from tests.contracts.stream_backends import QUIET
from worker.adapters import kafka_exactly_once
from worker.adapters.kafka import KafkaConfig, KafkaStream
from worker.errors import StreamError
from worker.ports import Delivery, Finished, Output, Partition, PartitionSettlement, Settled, Settlement


class HesitatingProducer(Producer):  # type: ignore[misc]
    """The real one, with a pause before one of its steps."""

    stops_before = "commit_transaction"

    def send_offsets_to_transaction(self, *arguments: Any) -> None:
        self._hesitate("outputs")
        super().send_offsets_to_transaction(*arguments)

    def commit_transaction(self, *arguments: Any) -> None:
        self._hesitate("offsets")
        super().commit_transaction(*arguments)

    def _hesitate(self, reached: str) -> None:
        if reached == self.stops_before:
            HesitatingProducer.stops_before = ""
            print("reached", flush=True)
            sys.stdin.readline()


class Taker:
    """Hands over nothing."""

    def assigned(self, epochs: Mapping[Partition, int]) -> None: ...

    def revoking(self, partitions: Sequence[Partition]) -> Settlement:
        return Settlement()

    def released(self, partitions: Sequence[Partition], settled: Settled) -> None: ...

    def lost(self, partitions: Sequence[Partition]) -> None: ...

    def gap(self, gap: object) -> None: ...


def main() -> None:
    servers, topic, group, output, count, stops_before = sys.argv[1:]
    kafka_exactly_once.Producer = HesitatingProducer  # type: ignore[misc]
    HesitatingProducer.stops_before = stops_before
    config = KafkaConfig(servers, topic, group, session_timeout_ms=6_000, delivery="exactly_once")
    stream = KafkaStream(config, QUIET)
    stream.open(Taker())
    got: list[Delivery] = []
    until = time.monotonic() + 60
    while len(got) < int(count) and time.monotonic() < until:
        got.extend(stream.poll(500, 0.1))
    lanes: dict[Partition, list[Finished]] = {}
    for delivery in got:
        outputs = (Output(output, delivery.key, delivery.value),)
        lanes.setdefault(delivery.partition, []).append(Finished(delivery, outputs))
    parts = [
        PartitionSettlement(partition, items[0].delivery.epoch, tuple(items), items[-1].delivery.offset + 1)
        for partition, items in lanes.items()
    ]
    try:
        stream.settle(Settlement(tuple(parts)))
        print("settled", flush=True)
    except StreamError as error:
        print(type(error).__name__, flush=True)
    stream.close()


if __name__ == "__main__":
    main()
