"""What goes wrong in other consumers, tried on the worker without a broker or with the embedded one."""

from __future__ import annotations

import asyncio
import math
import platform
import subprocess
import sys
import time

import orjson
import pytest
from structlog.testing import capture_logs

from tests.contracts.stream_backends import QUIET
from tests.runtime.desks import RULES, broker, ends, make_worker, send
from tests.runtime.engines import ScriptedEngine
from tests.servers.faulty_broker import FaultyBroker
from tests.waiting import until
from worker.adapters.kafka import KafkaStream
from worker.adapters.kafka_client import KafkaConfig
from worker.adapters.memory import MemoryStream
from worker.adapters.topic_log import TopicWriter
from worker.core.envelope import ORIGIN_OFFSET, Origin, dead_letter_headers
from worker.ports import Headers, Output
from worker.runtime.loop import Limits
from worker.runtime.service import running


async def test_timestamps_that_mean_nothing_harm_nothing() -> None:
    """None, seconds, microseconds, the future, and the largest there are."""
    now_ms = int(time.time() * 1_000)
    odd = [-1, 0, 10**10, 10**16, now_ms + 86_400_000, 2**63 - 1]
    on = broker(partitions=1)
    for n, timestamp_ms in enumerate(odd):
        body = orjson.dumps({"id": f"t{n}", "text": f"label {n % 3} {n}"})
        on.produce(RULES.input_topic, None, body, timestamp_ms=timestamp_ms)
    engine = ScriptedEngine(delay_s=0.3)
    worker = make_worker(on, engine)
    async with running(worker):
        await until(lambda: worker.status().in_flight == len(odd))
        age_s = worker.status().oldest_age_s
        assert math.isfinite(age_s)
        assert age_s >= 0
        await until(lambda: worker.status().settled == len(odd))
    assert len(ends(on)) == len(odd)


def test_headers_do_not_grow_however_often_a_message_is_dead_lettered_and_sent_in_again() -> None:
    headers: Headers = (("theirs", b"1"), ("theirs", b"2"))
    sizes = []
    for _ in range(6):
        headers = dead_letter_headers(headers, Origin("tickets", 0, 7), "no_text", "there is no text")
        sizes.append((len(headers), sum(len(name) + len(value or b"") for name, value in headers)))
    assert set(sizes) == {sizes[0]}
    assert [value for name, value in headers if name == ORIGIN_OFFSET] == [b"7"]
    assert [pair for pair in headers if pair[0] == "theirs"] == [("theirs", b"1"), ("theirs", b"2")]


async def test_neither_a_hanging_engine_nor_a_blocked_event_loop_costs_the_worker_its_partitions(
    embedded_broker: FaultyBroker,
) -> None:
    """Half as long again as a member may be silent (session) or not poll (max.poll.interval)."""
    config = KafkaConfig(
        embedded_broker.bootstrap_servers,
        RULES.input_topic,
        "g",
        assignment_strategy="range",
        session_timeout_ms=6_000,
        max_poll_interval_ms=6_000,
    )
    embedded_broker.create_topic(RULES.input_topic, 2)
    for topic in RULES.output_topics:
        embedded_broker.create_topic(topic, 1)
    writer = TopicWriter(embedded_broker.bootstrap_servers)
    for n in range(20):
        body = orjson.dumps({"id": f"t{n}", "text": f"label {n % 3} {n}"})
        writer.write(Output(RULES.input_topic, b"%d" % n, body))
    writer.flush(30)
    engine = ScriptedEngine(delay_s=9.5)
    limits = Limits(max_in_flight=10, settle_interval_s=0.05, drain_s=5.0)
    worker = make_worker(broker(), engine, limits=limits, stream=KafkaStream(config, QUIET))  # type: ignore[arg-type]
    with capture_logs() as lines:
        async with running(worker):
            await until(lambda: worker.status().in_flight == 10, timeout_s=40)
            over = time.monotonic() + 9.0
            while time.monotonic() < over:
                time.sleep(0.2)  # noqa: ASYNC251  # a callback that blocks
                await asyncio.sleep(0.01)
            assert worker.status().assigned == 2
            engine.delay_s = 0.0
            await until(lambda: worker.status().settled == 20, timeout_s=40)
            events = [line["event"] for line in lines if str(line["event"]).startswith("partitions.")]
            assert events == ["partitions.assigned"]


async def test_a_partition_that_goes_away_and_comes_back_twice_commits_to_its_end() -> None:
    on = broker(partitions=2)
    ids = send(on, 60)
    limits = Limits(max_in_flight=10, settle_interval_s=0.01, drain_s=0.2, revoke_s=0.05)
    stays = make_worker(on, ScriptedEngine(delay_s=0.2), limits=limits, stream=MemoryStream(on, RULES.input_topic))
    async with running(stays):
        for _ in range(2):
            await until(lambda: stays.status().assigned == 2 and stays.status().in_flight > 0)
            visitor = make_worker(on, ScriptedEngine(delay_s=0.2), limits=limits)
            async with running(visitor):
                await until(lambda v=visitor: v.status().assigned == 1 and v.status().in_flight > 0)
        await until(lambda: all(i in ends(on) for i in ids))
        await until(lambda: sum(on.committed("ticket-router").values()) == 60)


FREES_MUCH = """
import resource, sys
from worker.runtime.service import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for turn in range(60):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    batch = [bytes(6_000) for _ in range(4_000)]
    del batch
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_what_one_batch_frees_the_next_one_takes_without_the_kernel() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FREES_MUCH, how], capture_output=True, check=True).stdout)
        for how in ("kept", "given back")
    }
    assert faults["kept"] < faults["given back"] / 10
