"""The benchmarks run and say something: every part at a tiny size, but for what needs a model or another framework."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.bench import cache, engine, pipeline, profile, saturation, sizing, slow, stages, whole
from tests.bench.engine import Asked
from tests.bench.ground import apache_broker, collector
from tests.bench.memory import Growth
from tests.bench.pipeline import INPUT
from tests.bench.report import Results
from tests.bench.tickets import ticket_bytes
from tests.bench.watch import Sight, cost_of, watch
from tests.integration.desk import StubProcess
from tests.servers.kafka import ApacheKafka


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess(latency_s=0.0) as process:
        yield process


@pytest.fixture(scope="module")
def collector_url() -> Iterator[str]:
    with collector() as url:
        yield url


def test_the_pipeline_part_runs_and_prints_ratios(tmp_path: Path, stub: StubProcess, collector_url: str) -> None:
    results = Results(short=True)
    results.pipeline = pipeline.run(tmp_path, stub.url, collector_url, 3_000, 5.0, None)
    assert [row.cost is not None for row in results.pipeline] == [True] * 4 + [False] * 3
    results.plot(tmp_path / "costs.png")
    assert (tmp_path / "costs.png").stat().st_size > 1_000
    printed = results.tables()
    assert "1.00x" in printed
    assert results.conditions()["date"] in printed
    assert results.conditions()["machine"] in printed
    assert orjson.loads(results.to_json())["pipeline"][0]["cost"]["cpu_us"] > 0


def test_the_whole_worker_and_the_saturated_engine_run_and_print(
    tmp_path: Path, apache_kafka: ApacheKafka, stub: StubProcess, redis_url: str, collector_url: str
) -> None:
    bench = whole.Bench(tmp_path, apache_broker(apache_kafka.bootstrap_servers), stub, redis_url, collector_url)
    bench.broker.fill(INPUT, ticket_bytes(4_000))
    results = Results(short=True)
    results.whole = whole.run(bench, 4_000, 1.0, (0.02,), (8,))
    results.saturation = saturation.run(bench, 1.0)
    results.slow = slow.run(bench, 2.0, 1.0)
    results.sizing = sizing.run(bench, 0.5, (5,), (200,))
    printed = results.tables()
    assert [phase.calls > 0 for phase in results.slow.phases] == [True] * 3
    assert results.slow.phases[1].call_p50_ms > 100, "the engine was slow"
    results.plot(tmp_path / "whole.png")
    assert (tmp_path / "whole.png").stat().st_size > 1_000
    for line in (
        "worker, 8 items, 20 ms",
        "all cached",
        "of the generator's",
        "four times slower",
        "share of a saturated engine",
    ):
        assert line in printed
    assert results.whole.cases[0].items_per_request > 1
    assert orjson.loads(results.to_json())["whole"]["plain_transactions"]["tickets"] > 0


async def test_the_cache_part_runs_and_prints(redis_url: str) -> None:
    results = Results(short=True)
    results.cache = await cache.run(redis_url, 5)
    assert "one MGET for 32" in results.tables()


async def test_latencies_are_those_of_the_tickets_that_were_asked_about() -> None:
    async def ask(text: str) -> None:
        await asyncio.sleep(0.01)

    row = await engine._closed_loop("scoring", ask, ["a", "b"], 4, 0.2)
    assert row.tickets >= 4
    assert row.p50_ms >= 10
    slower = Asked("writing, word", 4, 1, row.per_second / 3, 1.0, 1.0, 0)
    printed = Results(short=True, engine=[row, slower], engine_name="a model").tables()
    assert "a model" in printed
    assert "3.0x" in printed


def test_a_cost_is_that_of_the_steady_part() -> None:
    sights = [Sight(0.0, 5.0, 90.0, 0), Sight(1.0, 5.5, 100.0, 100), Sight(2.0, 5.6, 120.0, 600)]
    sights += [Sight(3.0, 5.7, 110.0, 1_100), Sight(4.0, 6.7, 110.0, 1_100)]
    cost = cost_of(sights)
    assert (cost.tickets, cost.seconds, cost.rss_mib) == (500, 1.0, 120.0)
    assert cost.cpu_us == pytest.approx(200.0)
    assert cost.per_second == 500


def test_every_stage_costs_something_and_telemetry_is_judged(collector_url: str) -> None:
    results = Results(short=True, stages=stages.run(collector_url, 20))
    assert all(stage.us > 0 for stage in results.stages)
    assert [target.name for target in results.targets()] == [
        "a decision's metrics, without a log line",
        "span, 1 % sampled",
    ]


def test_a_sample_belongs_to_the_innermost_stage_that_is_named_and_waiting_is_none() -> None:
    lines = [
        "main (worker/cli.py:1);Worker._ask (loop.py:2);Router.ask (router.py:3);Flagger.find (suspicion.py:4) 3",
        "main (worker/cli.py:1);Worker._ask (loop.py:2);CacheBatch.get (cache_batch.py:3) 2",
        "main (worker/cli.py:1);Runner.run (asyncio/runners.py:2) 4",
        "thread (1);worker (concurrent/futures/thread.py:1);wait (threading.py:2) 50",
    ]
    assert profile.by_stage(lines) == {"what addresses the router": 3, "cache": 2, "event loop and the rest": 4}


def test_a_missed_target_is_called_missed() -> None:
    grown = [Growth(False, 1_000_000, 100.0, 140.0, 140.0, ()), Growth(True, 1_000, 100.0, 102.0, 101.0, ())]
    printed = Results(short=True, memory=grown).tables()
    assert "MISSED memory after 1,000,000 tickets by rule: 1.40x" in printed
    assert "holds  memory after 1,000 tickets scored: 1.01x" in printed


def test_growth_is_told_from_a_quarter_on() -> None:
    grown = Growth(False, 1_000_000, 100.0, 112.0, 110.0, ())
    assert "1,000,000 tickets by rule: 100 MiB after a quarter" in Results(short=True, memory=[grown]).tables()


def test_what_settles_in_order_counts_from_the_second_round_on_and_for_a_whole_one() -> None:
    """The first of a round wait for all the others, so that less than a round shows a standstill or a burst."""
    rounds = iter([0, 1, 1, 1, 100, 101, 101, 101, 200, 201])
    sights = watch(os.getpid(), lambda: next(rounds), 10_000, at_most_s=0.0, settle_units=100)
    assert [sight.done for sight in sights] == [100, 101, 101, 101, 200]
