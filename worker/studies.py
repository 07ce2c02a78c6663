"""Commands that study: calibrate, evaluate, self-test, demo and trials; they need the offline or embedded extras."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from worker import wiring
from worker.adapters.embedded import EmbeddedBroker, EmbeddedCache
from worker.adapters.files import CALIBRATION_FILE, SAMPLES_FILE, Labelled, load_labelled, write_atomically
from worker.adapters.llama_cpp import LICENCE_NOTICE
from worker.errors import ConfigError
from worker.offline.calibrate import CalibrationResult, calibrate
from worker.offline.demo import DeskResult, Progress, in_calibration_part, run_desk, summarise
from worker.offline.demo_summary import DemoSummary
from worker.offline.evaluate import Evaluation, evaluate
from worker.offline.report import Report, calibration_report, demo_report, evaluation_report, selftest_report
from worker.offline.scoring import ScoredTicket, score_labelled
from worker.offline.selftest import SelfTest, selftest
from worker.offline.trial import MAX_ROWS, Trial, labelled_csv, load_spec, prepare
from worker.ports import ScoringEngine
from worker.runtime.loop import Worker
from worker.runtime.question import Question
from worker.settings import Settings
from worker.telemetry import Metrics, NoTracing
from worker.wiring import Assembly, Desk

SEED = 20261130
"""Of everything that is drawn in calibration; any number would do, but always the same one."""
DEMO_SETS = ("helpdesk", "civil_complaints")
DEMO_SESSION_MS = 6_000
"""librdkafka's mock cluster assigns nothing with less (2.16)."""

Start = Callable[[str], Progress]
"""Makes a progress bar of that name, and gives the function that moves it."""


@asynccontextmanager
async def _asked(settings: Settings, folder: Path) -> AsyncIterator[tuple[Desk, Question, ScoringEngine]]:
    """A rule set's question, put to the first engine of the settings."""
    desk = Desk.load(folder)
    (_, engine), *_ = wiring.make_engines(settings)
    try:
        yield desk, await wiring.ask_once(desk.rule_set, engine), engine
    finally:
        await engine.aclose()


def _labelled(folder: Path, categories: tuple[str, ...], file: Path | None, part: str) -> tuple[Labelled, ...]:
    tickets = load_labelled(file or folder / SAMPLES_FILE, categories)
    if part == "all":
        return tickets
    return tuple(t for t in tickets if in_calibration_part(t.id) == (part == "calibration"))


async def calibrate_command(
    settings: Settings,
    folder: Path,
    labelled: Path | None,
    part: str,
    joint: bool,
    alpha: float | None,
    delta: float | None,
    journal: Path | None,
    progress: Progress,
) -> CalibrationResult:
    """Score the labelled tickets (or read them from the journal), fit and certify. Raises ConfigError, EngineError."""
    async with _asked(settings, folder) as (desk, question, engine):
        tickets = _labelled(folder, desk.rule_set.categories.ids, labelled, part)
        scored = await _scored(settings, question, engine, tickets, journal, progress)
    created_at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return calibrate(question, scored, seed=SEED, created_at=created_at, alpha=alpha, delta=delta, joint=joint)


async def evaluate_command(
    settings: Settings, folder: Path, labelled: Path | None, part: str, journal: Path | None, progress: Progress
) -> Evaluation:
    """Held-out tickets against the artefact of the rule set. Raises ConfigError, EngineError."""
    async with _asked(settings, folder) as (desk, question, engine):
        if desk.artefact is None:
            raise ConfigError(f"{folder / CALIBRATION_FILE}: no calibration to evaluate; run `ticket-router calibrate`")
        tickets = _labelled(folder, desk.rule_set.categories.ids, labelled, part)
        scored = await _scored(settings, question, engine, tickets, journal, progress)
    return evaluate(question, desk.artefact, scored, seed=SEED)


async def selftest_command(
    settings: Settings, folder: Path, labelled: Path | None, repeat: int, orders: int, progress: Progress
) -> SelfTest:
    """Is this engine usable for this rule set? Raises ConfigError, EngineError."""
    async with _asked(settings, folder) as (desk, question, engine):
        tickets = _labelled(folder, desk.rule_set.categories.ids, labelled, "all")
        return await selftest(
            question,
            engine,
            tickets,
            repeat=repeat,
            orders=orders,
            batch_items=settings.batch_items,
            progress=progress,
            sleep=asyncio.sleep,
        )


async def _scored(
    settings: Settings,
    question: Question,
    engine: ScoringEngine,
    tickets: tuple[Labelled, ...],
    journal: Path | None,
    progress: Progress,
) -> list[ScoredTicket]:
    # An engine without batches gains nothing from them, and a progress bar loses.
    items = 1 if settings.engine == "llama_cpp" else settings.batch_items
    return await score_labelled(question, engine, tickets, journal, items, progress, sleep=asyncio.sleep)


def write_artefact(result: CalibrationResult, folder: Path) -> Path:
    """calibration.json of the rule set."""
    path = folder / CALIBRATION_FILE
    write_atomically(path, result.artefact.to_bytes())
    return path


def write_report(report: Report, folder: Path) -> Path:
    """report.html with its figures beside it as PNG."""
    for figure in report.figures:
        write_atomically(folder / f"{figure.name}.png", figure.png)
    path = folder / "report.html"
    write_atomically(path, report.html.encode())
    return path


def write_calibration_report(result: CalibrationResult, folder: Path) -> Path:
    return write_report(calibration_report(result), folder)


def write_evaluation_report(result: Evaluation, folder: Path) -> Path:
    return write_report(evaluation_report(result), folder)


def write_selftest_report(result: SelfTest, folder: Path) -> Path:
    return write_report(selftest_report(result), folder)


def write_demo_report(summary: DemoSummary, folder: Path) -> Path:
    return write_report(demo_report(summary), folder)


# -- demo and trials -----------------------------------------------------------------------------------------------


def licence_notice() -> str:
    return LICENCE_NOTICE


async def demo(
    settings: Settings, rule_sets: Path, count: int, start: Start
) -> tuple[tuple[DeskResult, ...], DemoSummary]:
    """Both rule sets' demo parts through an embedded broker, cache and model, twice."""
    began = time.monotonic()
    results = []
    with EmbeddedBroker() as broker, EmbeddedCache() as cache:
        local = _embedded(settings, broker.bootstrap_servers, cache.url)
        engines = wiring.make_engines(local)
        try:
            for name in DEMO_SETS:
                desk = Desk.load(rule_sets / name)
                _create_topics(broker, desk)
                samples = load_labelled(desk.folder / SAMPLES_FILE, desk.rule_set.categories.ids)
                tickets = [t for t in samples if not in_calibration_part(t.id)][:count]
                results.append(await _route(local, desk, engines, tickets, passes=2, progress=start(name)))
        finally:
            for _, engine in engines:
                await engine.aclose()
    summary = summarise(
        results,
        created_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        hardware=f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        seconds=time.monotonic() - began,
    )
    return tuple(results), summary


async def trial(
    settings: Settings, name: str, data: Path, folder: Path, rows: int, alpha: float, delta: float, start: Start
) -> tuple[Trial, CalibrationResult, DeskResult]:
    """A data set of somebody else's: calibrate on one part, route the other through Kafka. Raises ConfigError."""
    prepared = prepare(load_spec(name), data, folder, rows=min(rows, MAX_ROWS), alpha=alpha, delta=delta)
    labelled = folder / "calibration.csv"
    write_atomically(labelled, labelled_csv(prepared.calibration))
    local = settings.model_copy(update={"engine": "llama_cpp"})
    journal = folder / "scores.jsonl"
    result = await calibrate_command(
        local, folder, labelled, "all", False, None, None, journal, start(f"{name}: calibrating")
    )
    write_artefact(result, folder)
    with EmbeddedBroker() as broker, EmbeddedCache() as cache:
        local = _embedded(settings, broker.bootstrap_servers, cache.url)
        engines = wiring.make_engines(local)
        try:
            desk = Desk.load(folder)
            _create_topics(broker, desk)
            bar = start(f"{name}: routing")
            routed = await _route(local, desk, engines, prepared.routing, passes=1, progress=bar)
        finally:
            for _, engine in engines:
                await engine.aclose()
    return prepared, result, routed


def _embedded(settings: Settings, bootstrap_servers: str, redis_url: str | None) -> Settings:
    """These settings on the embedded parts; checked again as any others."""
    return Settings(
        **settings.model_dump(exclude={"kafka_properties", "redis_url", "cache_secret", "engine_api_key"})
        | {
            "kafka_bootstrap_servers": bootstrap_servers,
            "kafka_assignment_strategy": "range",
            "kafka_session_timeout_ms": DEMO_SESSION_MS,
            "redis_url": redis_url,
            "cache_secret": secrets.token_hex(32),
            "engine": "llama_cpp",
            "max_in_flight": 4,
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
        question = await wiring.ask_once(desk.rule_set, engines[0][1])
        calibration = await wiring.calibration_for(desk, question, engines, lambda _: None)
        async with Assembly(
            settings,
            question,
            calibration,
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
