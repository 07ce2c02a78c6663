"""Three workers, one Redis: equal tickets are scored once among them, and an operator can look and flush."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from tests.integration.desk import COMMAND, Desk, StubProcess, WorkerProcess, http
from tests.servers.kafka import ApacheKafka
from tests.servers.redis_server import redis_server
from worker.ports import Output

pytestmark = pytest.mark.kafka

TEXT = "the very same thing happened once more"


@pytest.fixture
def redis_of_its_own() -> Iterator[str]:
    with redis_server() as url:
        yield url


def _counters(worker: WorkerProcess) -> dict[str, float]:
    page = http(f"http://127.0.0.1:{worker.port}/metrics")[1].decode()
    found = re.findall(r'^ticket_router_cache_(\w+)_total\{outcome="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {f"{name} {outcome}": float(value) for name, outcome, value in found}


def _cache(desk: Desk, redis: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(COMMAND), "cache", *arguments]
    environment = {**desk.environment, "ROUTER_REDIS_URL": redis, "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, check=False, env=environment, cwd=desk.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def test_a_thousand_equal_tickets_over_three_workers_are_scored_once(
    tmp_path: Path, apache_kafka: ApacheKafka, redis_of_its_own: str
) -> None:
    # Slow enough that every worker meets the ticket before the first answer is there.
    with StubProcess(latency_s=0.5) as engine, ExitStack() as workers:
        desk = Desk(tmp_path, apache_kafka.bootstrap_servers, engine.url, partitions=6)
        settings = {"redis_url": redis_of_its_own, "redis_timeout_ms": 2_000}
        started = [workers.enter_context(desk.worker(**settings)) for _ in range(3)]
        engine.tell(counted=TEXT)
        ids = [f"same{n}" for n in range(1_000)]
        for n, ticket_id in enumerate(ids):
            body = orjson.dumps({"id": ticket_id, "text": TEXT})
            desk._writer.write(Output(desk.rules.input_topic, f"k{n}".encode(), body))
        desk._writer.flush(60)
        found = desk.wait_for_all(ids)
        assert {len(ends) for ends in found.values()} == {1}
        # Twice is what a lease that ended on a machine that stood still would cost.
        assert 1 <= engine.tell()["counters"]["counted"] <= 2
        counts = [_counters(worker) for worker in started]
        assert sum(count["waits in_vain"] for count in counts) == 0
        assert sum(count["lookups memory_hits"] for count in counts) > 0

        seen = _cache(desk, redis_of_its_own, "stats", "--rules", str(desk.folder))
        assert f"{desk.rules.id}: 1 entries" in seen.stdout, seen.stderr
        dry = _cache(desk, redis_of_its_own, "flush", "--rules", str(desk.folder), "--dry-run")
        assert "would forget 1 entries" in dry.stdout, dry.stderr
        refused = _cache(desk, redis_of_its_own, "flush", "--rules", str(desk.folder))
        assert (refused.returncode, "say --yes" in refused.stderr) == (2, True)
        flushed = _cache(desk, redis_of_its_own, "flush", "--rules", str(desk.folder), "--yes")
        assert "forgot 1 entries" in flushed.stdout, flushed.stderr
        assert "nothing is remembered" in _cache(desk, redis_of_its_own, "stats").stdout
