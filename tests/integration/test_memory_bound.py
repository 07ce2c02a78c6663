"""Real Kafka, a real process: a backlog of large tickets does not fill memory. docs/operating.md has the arithmetic."""

from __future__ import annotations

import random
import re
from pathlib import Path

import orjson
import pytest

from tests.integration.desk import LABELS, Desk, StubProcess
from tests.servers.kafka import ApacheKafka
from tests.waiting import wait_for
from worker.adapters.topic_log import TopicWriter
from worker.ports import Output

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

TICKETS, TICKET_BYTES, PARTITIONS = 2_000, 499_900, 12
IN_FLIGHT_MIB = 64
"""The default of ROUTER_MAX_IN_FLIGHT_BYTES."""
AT_REST_MIB = 130
"""A worker without tickets (about 90 here), and what the allocator keeps."""


@pytest.mark.parametrize(
    ("content", "fetched_mib"),
    [
        pytest.param("random", 6, id="incompressible"),  # one answer of 1 MB behind a queue of 4 MiB
        pytest.param("repeated", 6 + 200, id="compressed-to-a-two-hundredth"),  # the answer is decompressed at once
    ],
)
def test_2000_tickets_of_500_kb_in_12_partitions_stay_within_the_stated_bound(
    tmp_path: Path, apache_kafka: ApacheKafka, engine: StubProcess, content: str, fetched_mib: int
) -> None:
    desk = Desk(tmp_path, apache_kafka.bootstrap_servers, engine.url, partitions=PARTITIONS)
    fill(desk, content)
    engine.tell(latency_s=1.0)  # so that as much is in flight as may be
    try:
        with desk.worker(max_in_flight_bytes=IN_FLIGHT_MIB * 2**20) as worker:
            wait_for(lambda: worker.status().get("in_flight_bytes", 0) > 0.9 * IN_FLIGHT_MIB * 2**20, "a full worker")
            engine.tell(latency_s=0.01)
            wait_for(lambda: worker.status().get("settled", 0) > 300, f"progress; {worker.tail()}", 120)
            assert worker.status()["in_flight_bytes"] <= IN_FLIGHT_MIB * 2**20
            most = peak_mib(worker.process.pid)
    finally:
        engine.tell(latency_s=0.01)
    # Twice: as received, and once more in the producer's queue while they are settled.
    assert most < AT_REST_MIB + 2 * IN_FLIGHT_MIB + fetched_mib


def fill(desk: Desk, content: str) -> None:
    compressed = content == "repeated"
    writer = TopicWriter(
        desk.bootstrap_servers,
        {"compression.type": "lz4" if compressed else "none", "queue.buffering.max.kbytes": 65_536},
    )
    noise = random.Random(1).randbytes(TICKET_BYTES // 2).hex()
    for n in range(TICKETS):
        attachment = (f"{n} again and " * (TICKET_BYTES // 10) if compressed else noise)[: TICKET_BYTES - 100]
        body = {"id": f"t{n}", "text": f"ticket {n}: trouble with {LABELS[n % 3]}", "attachment": attachment}
        writer.write(Output(desk.rules.input_topic, None, orjson.dumps(body)), n % PARTITIONS)
    writer.flush(120)


def peak_mib(pid: int) -> float:
    """The most memory that was ever resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024
