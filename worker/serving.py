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
from typing import Literal

from worker import wiring
from worker.adapters.kafka_topics import create_topics, describe_topics
from worker.adapters.topic_log import TopicReader, TopicWriter
from worker.core.policy import Calibration
from worker.errors import ConfigError
from worker.offline.audit import Ledger
from worker.offline.audit import audit as audit_topics
from worker.offline.check import (
    Finding,
    check_cache,
    check_calibration,
    check_engine,
    check_rules,
    check_topics,
)
from worker.offline.replay import Replay, Selection
from worker.offline.replay import plan as plan_replay
from worker.runtime.http import HealthServer
from worker.runtime.loop import Status, Worker
from worker.runtime.question import Question
from worker.runtime.service import until_signalled
from worker.settings import Settings
from worker.telemetry import LOG_LINES_DROPPED, LogSink, Metrics, set_up_logging, start_export
from worker.wiring import Assembly, Desk

EXPORT_CLOSE_S = 3.0
CLOCK_SKEW_MS = 3_600_000
"""Outputs may be stamped by another machine's clock than the tickets that they belong to."""
AUDIT_LOOKS, AUDIT_PAUSE_S = 3, 15.0
"""What lies behind a dead worker's open transaction cannot be read until the brokers have ended that: look again."""
WRITE_S = 120.0
"""How long the brokers may take to acknowledge what is sent in again."""


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
        findings.append(Finding("topics", "wrong", str(error), "set it"))
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


def audit(settings: Settings, folder: Path, since_ms: int | None) -> Ledger:
    """What became of the tickets that came in since then. Raises ConfigError, StreamRetriable."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    ends = [topic for topic in rule_set.output_topics if topic != rule_set.decisions_topic]
    reader = TopicReader(config.bootstrap_servers, config.properties, config.group_id)
    try:
        for look in range(1, AUDIT_LOOKS + 1):
            committed = reader.committed(config.input_topic)
            tickets = reader.records([config.input_topic], since_ms=since_ms)
            outputs = reader.records(ends, since_ms=None if since_ms is None else max(0, since_ms - CLOCK_SKEW_MS))
            ledger = audit_topics(rule_set, tickets, outputs, committed)
            if not ledger.missing or look == AUDIT_LOOKS:
                break
            time.sleep(AUDIT_PAUSE_S)
    finally:
        reader.close()
    return ledger


def replay(
    settings: Settings,
    folder: Path,
    source: Literal["dead-letter", "human"],
    since_ms: int | None,
    selection: Selection,
    *,
    dry_run: bool,
) -> Replay:
    """Sends dead letters or escalated tickets in again. Raises ConfigError, StreamRetriable."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    dead_letters = source == "dead-letter"
    topic = rule_set.dead_letter_topic if dead_letters else rule_set.human_topic
    reader = TopicReader(config.bootstrap_servers, config.properties)
    try:
        sent_in = reader.records(
            [config.input_topic], since_ms=None if since_ms is None else max(0, since_ms - CLOCK_SKEW_MS)
        )
        records = reader.records([topic], since_ms=since_ms)
        planned = plan_replay(records, sent_in, config.input_topic, dead_letters, selection)
    finally:
        reader.close()
    if not dry_run:
        properties = {**config.properties, "message.max.bytes": config.max_output_bytes}
        writer = TopicWriter(config.bootstrap_servers, properties)
        for resend in planned.resends:
            writer.write(resend.output, resend.partition)
        writer.flush(WRITE_S)
    return planned
