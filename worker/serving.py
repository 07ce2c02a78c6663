"""Commands that operate the worker: run it, check it, its topics, its decisions; none needs the offline extra."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from worker import wiring
from worker.adapters.kafka_topics import create_topics, describe_topics
from worker.adapters.topic_log import TopicReader
from worker.core.policy import Calibration
from worker.errors import ConfigError
from worker.offline.check import (
    Finding,
    check_cache,
    check_calibration,
    check_engine,
    check_rules,
    check_topics,
)
from worker.runtime.http import HealthServer
from worker.runtime.loop import Status, Worker
from worker.runtime.question import Question
from worker.runtime.service import until_signalled
from worker.settings import Settings
from worker.telemetry import LOG_LINES_DROPPED, LogSink, Metrics, set_up_logging, start_export
from worker.wiring import Assembly, Desk

EXPORT_CLOSE_S = 3.0


def set_up_telemetry(settings: Settings, *, quiet: bool = False) -> LogSink:
    """Logs to standard output; `quiet` for commands that talk to a person: warnings only, to standard error."""
    stream = sys.stderr if quiet else sys.stdout
    form = settings.log_format if settings.log_format != "auto" else ("console" if stream.isatty() else "json")
    level = "error" if quiet and settings.log_level in {"info", "warning"} else settings.log_level
    return set_up_logging(level=level, form=form, fd=stream.fileno(), clock=time.time)


async def serve(settings: Settings, folder: Path, log_sink: LogSink) -> None:
    """The worker as a process: health port first, then engine, then Kafka. Raises RouterError where it must end."""
    desk = Desk.load(folder)
    secret = wiring.cache_secret(settings)
    stream = wiring.make_stream(settings, desk.rule_set)
    metrics = Metrics()
    metrics.watch(LOG_LINES_DROPPED, lambda: log_sink.dropped)
    state = _State()
    health = HealthServer(state.status, lambda: state.waiting_for, metrics.prometheus)
    engines = wiring.make_engines(settings)
    cache = wiring.make_cache(settings, secret)
    journal = wiring.make_journal(settings, metrics)
    resource = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "ticket-router")}
    export = start_export(os.environ, metrics, resource=resource, clock=time.monotonic, chance=random.random)

    def waiting(what: str) -> None:
        if what != state.waiting_for:
            journal.waiting(what)
        state.waiting_for = what

    async def work(announce: Callable[[Worker], None]) -> None:
        await health.start(settings.http_host, settings.http_port)
        question = await wiring.ask_until_available(desk.rule_set, engines, waiting)
        calibration = await wiring.calibration_for(desk, question, engines, waiting)
        state.waiting_for = None
        async with Assembly(
            settings,
            question,
            calibration,
            engines=engines,
            cache=cache,
            stream=stream,
            secret=secret,
            journal=journal,
            tracing=export.tracing,
        ) as assembly:
            state.worker = assembly.worker
            announce(assembly.worker)
            journal.started(desk.rule_set.id, desk.artefact.digest if desk.artefact else None)
            if not isinstance(calibration, Calibration):
                journal.uncalibrated(calibration.reason.sentence)
            await assembly.worker.run()
            journal.stopped(assembly.worker.status().settled)

    try:
        await until_signalled(work, forced=lambda: None)
    finally:
        await health.aclose()
        await cache.aclose()
        for _, engine in engines:
            await engine.aclose()
        await asyncio.to_thread(export.close, EXPORT_CLOSE_S)


@dataclass(slots=True)
class _State:
    """What the health port is asked about before there is a worker."""

    worker: Worker | None = None
    waiting_for: str | None = "starting"

    def status(self) -> Status | None:
        return self.worker.status() if self.worker is not None else None


async def check(settings: Settings, folder: Path) -> list[Finding]:
    """Everything a worker with these settings needs."""
    finding, rule_set = check_rules(folder)
    findings = [finding]
    if rule_set is None:
        return findings
    try:
        config = wiring.kafka_config(settings, rule_set)
    except ConfigError as error:
        findings.append(Finding("topics", "wrong", str(error), "set it, or run `make demo` for an embedded broker"))
    else:
        findings.append(check_topics(rule_set, config.input_topic, lambda names: describe_topics(config, names)))
    try:
        engines = wiring.make_engines(settings)
    except ConfigError as error:
        findings.append(Finding("engine", "wrong", str(error)))
        findings.append(check_calibration(folder, None))
    else:
        question: Question | None = None
        for name, engine in engines:
            more, asked = await check_engine(rule_set, engine)
            findings += [replace(f, part=f"{f.part} {name}") if len(engines) > 1 else f for f in more]
            question = question or asked
            await engine.aclose()
        findings.append(check_calibration(folder, question))
    try:
        cache = wiring.make_cache(settings, wiring.cache_secret(settings))
    except ConfigError as error:
        findings.append(Finding("cache", "wrong", str(error)))
    else:
        findings.append(await check_cache(cache if settings.redis_url is not None else None))
        await cache.aclose()
    return findings


def topics(
    settings: Settings, folder: Path, create: bool, partitions: int, replication: int
) -> Mapping[str, int | None]:
    """Every topic of the rule set with its partitions; None is missing. Raises ConfigError."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    names = (config.input_topic, *rule_set.output_topics)
    if create:
        create_topics(config, dict.fromkeys(names, partitions), replication)
    found = describe_topics(config, names)
    return {name: found.get(name) for name in names}


def export(settings: Settings, folder: Path, to: Path) -> int:
    """Every decision of the decisions topic, one JSON line each; how many there were. Raises ConfigError."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    reader = TopicReader(config.bootstrap_servers, config.properties)
    count = 0
    target = sys.stdout.buffer if str(to) == "-" else None
    try:
        with target or to.open("wb") as file:  # closing standard output is fine: nothing is written after
            for record in reader.records([rule_set.decisions_topic]):
                if record.value is not None:
                    file.write(record.value + b"\n")
                    count += 1
    except OSError as error:
        raise ConfigError(f"{to}: cannot be written: {error.strerror}") from error
    finally:
        reader.close()
    return count
