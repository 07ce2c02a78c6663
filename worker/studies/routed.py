"""Tickets through a whole worker on an embedded broker, cache and model: the demo, and trials of others' data."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from worker import wiring
from worker.adapters.embedded import CLIENT_SETTINGS, EmbeddedBroker, EmbeddedCache
from worker.adapters.files import SAMPLES_FILE, Labelled, load_labelled, write_atomically
from worker.adapters.llama_cpp import LICENCE_NOTICE
from worker.offline.calibration_run import CalibrateOptions, CalibrationRun
from worker.offline.demo import DeskResult, Progress, in_calibration_part, run_desk, summarise, with_estimate
from worker.offline.demo_summary import DemoSummary
from worker.offline.trial import MAX_ROWS, Trial, labelled_csv, load_spec, prepare
from worker.runtime.loop import Worker
from worker.settings import Settings
from worker.studies.calibrations import calibrate_command, write_artefact
from worker.studies.scored import SCORES_FILE, Start, machine, timestamp
from worker.telemetry import Metrics, NoTracing
from worker.wiring import Assembly, Desk

DEMO_SETS = ("helpdesk", "civil_complaints")


def licence_notice() -> str:
    return LICENCE_NOTICE


async def demo(
    settings: Settings, rule_sets: Path, count: int, start: Start, expect: Callable[[float], None]
) -> tuple[tuple[DeskResult, ...], DemoSummary]:
    """Both rule sets' demo parts through an embedded broker, cache and model, twice. `expect` is told after a few
    tickets how many seconds all of them take."""
    began = time.monotonic()
    results: list[DeskResult] = []
    with EmbeddedBroker() as broker, EmbeddedCache() as cache:
        local = _embedded(settings, broker.bootstrap_servers, cache.url)
        engines = wiring.make_engines(local)
        try:
            for name in DEMO_SETS:
                desk = Desk.load(rule_sets / name)
                _create_topics(broker, desk)
                samples = load_labelled(desk.folder / SAMPLES_FILE, desk.rule_set.categories.ids)
                tickets = [t for t in samples if not in_calibration_part(t.id)][:count]
                bar = start(name)
                if not results:
                    bar = with_estimate(bar, len(DEMO_SETS) * len(tickets), time.monotonic, expect)
                results.append(await _route(local, desk, engines, tickets, passes=2, progress=bar))
        finally:
            await wiring.close_engines(engines)
    summary = summarise(
        results,
        created_at=timestamp(),
        hardware=machine(),
        seconds=time.monotonic() - began,
    )
    return tuple(results), summary


async def trial(
    settings: Settings, name: str, data: Path, folder: Path, rows: int, alpha: float, delta: float, start: Start
) -> tuple[Trial, CalibrationRun, DeskResult]:
    """A data set of somebody else's: calibrate on one part, route the other through Kafka. Raises ConfigError."""
    prepared = prepare(load_spec(name), data, folder, rows=min(rows, MAX_ROWS), alpha=alpha, delta=delta)
    labelled = folder / "calibration.csv"
    write_atomically(labelled, labelled_csv(prepared.calibration))
    local = settings.model_copy(update={"engine": "llama_cpp"})
    calibrated = await calibrate_command(
        local, folder, labelled, "all", None, CalibrateOptions(), folder / SCORES_FILE, start
    )
    write_artefact(calibrated.result.artefact, folder)
    with EmbeddedBroker() as broker, EmbeddedCache() as cache:
        local = _embedded(settings, broker.bootstrap_servers, cache.url)
        engines = wiring.make_engines(local)
        try:
            desk = Desk.load(folder)
            _create_topics(broker, desk)
            bar = start(f"{name}: routing")
            routed = await _route(local, desk, engines, prepared.routing, passes=1, progress=bar)
        finally:
            await wiring.close_engines(engines)
    return prepared, calibrated, routed


def _embedded(settings: Settings, bootstrap_servers: str, redis_url: str | None) -> Settings:
    """These settings on the embedded parts; checked again as any others."""
    return Settings(
        **settings.model_dump(exclude={"kafka_properties", "redis_url", "cache_secret", "engine_api_key"})
        | {
            "kafka_bootstrap_servers": bootstrap_servers,
            **CLIENT_SETTINGS,
            "redis_url": redis_url,
            "cache_secret": secrets.token_hex(32),
            "engine": "llama_cpp",
            "max_in_flight": 4,  # the engine scores one after the other: more would only lengthen the latencies shown
            "settle_interval_ms": 50,
        }
    )


def _create_topics(broker: EmbeddedBroker, desk: Desk) -> None:
    for name in (desk.rule_set.input_topic, *desk.rule_set.output_topics):
        broker.create_topic(name)


async def _route(
    settings: Settings,
    desk: Desk,
    engines: wiring.Engines,
    tickets: Sequence[Labelled],
    *,
    passes: int,
    progress: Progress,
) -> DeskResult:
    secret = wiring.cache_secret(settings)
    cache = wiring.make_cache(settings, secret)

    @asynccontextmanager
    async def open_worker() -> AsyncIterator[Worker]:
        question = await wiring.ask_once(desk.rule_set, engines[0][1], sent=wiring.make_sent(settings))
        calibration = await wiring.calibration_for(desk, question, engines, lambda _: None)
        async with Assembly(
            settings,
            question,
            calibration,
            further=await wiring.further_for(desk, question, engines, lambda _: None),
            engines=engines,
            cache=cache,
            stream=wiring.make_stream(settings, desk.rule_set),
            secret=secret,
            journal=wiring.make_journal(settings, Metrics()),
            tracing=NoTracing(),
        ) as assembly:
            yield assembly.worker

    try:
        return await run_desk(
            desk.rule_set,
            desk.artefact,
            tickets,
            bootstrap_servers=str(settings.kafka_bootstrap_servers),
            open_worker=open_worker,
            passes=passes,
            progress=progress,
        )
    finally:
        await cache.aclose()
