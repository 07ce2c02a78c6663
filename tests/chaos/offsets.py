"""What a group has committed, looked at all the time: how far it is, and the samples that the ledger compares."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.chaos.ledger import Sample

LOOK_EVERY_S = 0.1
KEEP_EVERY_S = 1.0


class CommittedOffsets:
    """Watches while its block runs."""

    def __init__(self, bootstrap_servers: str, group: str, topic: str, partitions: int) -> None:
        self.settled = 0
        """Tickets behind which the group has committed, in all partitions together."""
        self.samples: list[Sample] = []
        self._asked = [TopicPartition(topic, number) for number in range(partitions)]
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": group,  # asked about, never joined
                "isolation.level": "read_uncommitted",  # else it is told only where no transaction is open
                "logger": _SILENT,
            }
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="committed-offsets", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._consumer.close()

    def _watch(self) -> None:
        kept_at = 0.0
        while not self._over.wait(LOOK_EVERY_S):
            with suppress(KafkaException):  # the coordinator is away
                found = {at.partition: max(0, at.offset) for at in self._consumer.committed(self._asked, timeout=2.0)}
                self.settled = max(self.settled, sum(found.values()))
                if time.monotonic() - kept_at >= KEEP_EVERY_S:
                    self.samples.append(Sample(int(time.time() * 1_000), found))
                    kept_at = time.monotonic()


class _Silent:
    def log(self, *_: object) -> None: ...


_SILENT = _Silent()
