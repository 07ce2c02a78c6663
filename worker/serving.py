"""Commands that operate the worker: run it, check it, its topics, its decisions; none needs the offline extra."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

from worker import wiring
from worker.adapters import redis_upkeep
from worker.adapters.chat_template import load_turns
from worker.adapters.files import rows
from worker.adapters.kafka_client import KafkaConfig
from worker.adapters.kafka_topics import create_topics, describe_topics, require_topics
from worker.adapters.topic_log import TopicReader, TopicWriter
from worker.core.policy import Calibration, NoCalibration
from worker.core.rules import RuleSet
from worker.core.turns import Turns
from worker.errors import ConfigError, EngineError
from worker.offline.audit import Ledger
from worker.offline.audit import audit as audit_topics
from worker.offline.check import (
    Finding,
    check_cache,
    check_calibration,
    check_engine,
    check_further,
    check_modes,
    check_rules,
    check_topics,
)
from worker.offline.exporting import Exported, lines_of
from worker.offline.prompt_view import PromptView, view_prompt
from worker.offline.replay import Replay, Resend, Selection
from worker.offline.replay import plan as plan_replay
from worker.offline.rule_tests import RuleTestRun, run_rule_tests
from worker.offline.rules_diff import RulesDiff, Side, diff_rules
from worker.offline.sending import as_message
from worker.runtime.http import Condition, HealthServer
from worker.runtime.question import Question
from worker.runtime.service import Stoppable, keep_freed_memory, spare_the_collector, until_signalled
from worker.settings import Settings
from worker.telemetry import LOG_LINES_DROPPED, LogSink, Metrics, set_up_logging, start_export
from worker.wiring import Assembly, DecideAssembly, Desk

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
    return set_up_logging(level=level, form=form, fd=stream.fileno(), clock=time.time, redact=settings.log_redact)


class _Process:
    """What a worker and a server over HTTP have in common: health port, engines, cache, journal, export."""

    def __init__(
        self, settings: Settings, desk: Desk, secret: bytes, log_sink: LogSink, *, joins_a_group: bool
    ) -> None:
        """Raises ConfigError. Nothing is connected to or listened on yet."""
        self._settings = settings
        self._joins_a_group = joins_a_group
        self._desk = desk
        self._log_sink = log_sink
        self._waiting_for: str | None = "starting"
        self.condition: Callable[[], Condition | None] = lambda: None
        """What the health port is asked about, once there is something to ask about."""
        metrics = Metrics()
        metrics.watch(LOG_LINES_DROPPED, lambda: log_sink.dropped)
        self._health = HealthServer(self._condition_now, lambda: self._waiting_for, metrics.prometheus)
        self.engines = wiring.make_engines(settings)
        self._sent = wiring.make_sent(settings)
        self.journal = wiring.make_journal(settings, metrics)
        self.cache = wiring.make_cache(settings, secret, self.journal.cache_trouble)
        resource = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "ticket-router")}
        self.export = start_export(
            os.environ,
            metrics,
            resource=resource,
            clock=time.monotonic,
            chance=random.random,
            followed_per_s=settings.trace_followed_per_s,
        )

    async def questions(self) -> tuple[Question, Calibration | NoCalibration, tuple[wiring.Calibrated, ...]]:
        """Opens the health port, waits for an engine, and says what it is asked under which calibrations."""
        await self._health.start(self._settings.http_host, self._settings.http_port)
        question = await wiring.ask_until_available(self._desk.rule_set, self.engines, self.waiting, self._sent)
        calibration = await wiring.calibration_for(self._desk, question, self.engines, self.waiting)
        further = await wiring.further_for(self._desk, question, self.engines, self.waiting)
        self._waiting_for = None
        return question, calibration, further

    def started(self, calibration: Calibration | NoCalibration, further: Sequence[wiring.Calibrated]) -> None:
        self._log_sink.gather(asyncio.get_running_loop().call_soon)
        artefact = self._desk.artefact
        self.journal.started(self._desk.rule_set.id, artefact.digest if artefact else None)
        if not isinstance(calibration, Calibration):
            self.journal.uncalibrated(calibration.reason.sentence)
        for question, own in further:
            if not isinstance(own, Calibration):
                self.journal.uncalibrated(f"{question.rule_set.id}: {own.reason.sentence}")

    async def aclose(self) -> None:
        self._log_sink.gather_no_more()
        await self._health.aclose()
        await self.cache.aclose()
        for _, engine in self.engines:
            await engine.aclose()
        await asyncio.to_thread(self.export.close, EXPORT_CLOSE_S)

    def _condition_now(self) -> Condition | None:
        return self.condition()

    def waiting(self, what: str) -> None:
        if what != self._waiting_for:
            self.journal.waiting(what, for_partitions=self._joins_a_group)
        self._waiting_for = what


def run(work: Coroutine[None, None, None]) -> None:
    """As asyncio.run; on uvloop where that is installed (extra `fast`), whose event loop costs less."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        asyncio.run(work)
        return
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


async def serve(settings: Settings, folder: Path, log_sink: LogSink) -> None:
    """The worker as a process: health port first, then engine, then Kafka. Raises RouterError where it must end."""
    desk = Desk.load(folder).at_most(settings.mode)
    secret = wiring.cache_secret(settings)
    config = wiring.kafka_config(settings, desk.rule_set)
    stream = wiring.make_stream(settings, desk.rule_set)
    process = _Process(settings, desk, secret, log_sink, joins_a_group=True)

    async def work(announce: Callable[[Stoppable], None]) -> None:
        question, calibration, further = await process.questions()
        await asyncio.to_thread(require_topics, config, desk.rule_set.output_topics)
        async with Assembly(
            settings,
            question,
            calibration,
            further=further,
            engines=process.engines,
            cache=process.cache,
            stream=stream,
            secret=secret,
            journal=process.journal,
            tracing=process.export.tracing,
        ) as assembly:
            process.condition = assembly.worker.status
            announce(assembly.worker)
            process.started(calibration, further)
            spare_the_collector()
            keep_freed_memory()
            await assembly.worker.run()
            process.journal.stopped(assembly.worker.status().settled)

    try:
        await until_signalled(work, forced=process.journal.abandoned)
    finally:
        await process.aclose()


async def serve_http(settings: Settings, folder: Path, log_sink: LogSink) -> None:
    """Decisions over HTTP as a process: health port, then engine, then its own port. Raises RouterError."""
    desk = Desk.load(folder).at_most(settings.mode)
    secret = wiring.cache_secret(settings)
    wiring.check_exposure(settings)
    process = _Process(settings, desk, secret, log_sink, joins_a_group=False)

    async def work(announce: Callable[[Stoppable], None]) -> None:
        question, calibration, further = await process.questions()
        turns = await wiring.chat_turns(desk.rule_set, process.engines, process.waiting)
        async with DecideAssembly(
            settings,
            question,
            calibration,
            further=further,
            engines=process.engines,
            cache=process.cache,
            secret=secret,
            journal=process.journal,
            turns=turns,
        ) as assembly:
            process.condition = assembly.server.status
            announce(assembly.server)
            process.started(calibration, further)
            spare_the_collector()
            keep_freed_memory()
            await assembly.server.run(settings.serve_host, settings.serve_port)
            process.journal.stopped(assembly.server.status().answered)

    try:
        await until_signalled(work, forced=process.journal.abandoned)
    finally:
        await process.aclose()


async def check(settings: Settings, folder: Path) -> list[Finding]:
    """Everything a worker with these settings needs."""
    finding, rule_set = check_rules(folder)
    findings = [finding]
    if rule_set is None:
        return findings
    findings.append(check_modes(rule_set, settings.mode))
    try:
        config = wiring.kafka_config(settings, rule_set)
    except ConfigError as error:
        findings.append(Finding("topics", "wrong", str(error), "set it"))
    else:
        findings.append(check_topics(rule_set, config.input_topic, lambda names: describe_topics(config, names)))
    try:
        engines, sent = wiring.make_engines(settings), wiring.make_sent(settings)
    except ConfigError as error:
        findings.append(Finding("engine", "wrong", str(error)))
        findings.append(check_calibration(folder, None))
    else:
        question: Question | None = None
        further: list[Finding] = []
        for name, engine in engines:
            more, asked = await check_engine(rule_set, engine, sent)
            findings += [replace(f, part=f"{f.part} {name}") if len(engines) > 1 else f for f in more]
            if question is None and asked is not None:
                question = asked
                further = await check_further(folder, question, engine)
            await engine.aclose()
        findings.append(check_calibration(folder, question))
        findings += further
    try:
        cache = wiring.make_cache(settings, wiring.cache_secret(settings))
    except ConfigError as error:
        findings.append(Finding("cache", "wrong", str(error)))
    else:
        findings.append(await check_cache(cache if settings.redis_url is not None else None))
        await cache.aclose()
    return findings


async def prompt_view(settings: Settings, folder: Path, text: str | None) -> PromptView:
    """What the first engine is sent for this text, or for the first example. Raises ConfigError."""
    rule_set = Desk.load(folder).rule_set
    first = rule_set.categories.categories[0]
    engines = wiring.make_engines(settings)
    try:
        question = await wiring.ask_once(rule_set, engines[0][1], sent=wiring.make_sent(settings))
        return await view_prompt(question, engines[0][1], text or (*first.examples, first.description)[0])
    except EngineError as error:
        raise ConfigError(f"the engine cannot be asked: {error}") from error
    finally:
        for _, engine in engines:
            await engine.aclose()


def turns(file: Path) -> Turns:
    """The turns of a model's chat template. Raises PromptError, ConfigError."""
    return load_turns(file)


def rules_test(folder: Path) -> RuleTestRun:
    """The rule set's own tests. Raises ConfigError."""
    return run_rule_tests(Desk.load(folder).rule_set)


def side(folder: Path) -> Side:
    """One version of a rule set, with the calibrations beside it. Raises ConfigError."""
    desk = Desk.load(folder)
    return Side(desk.rule_set, desk.artefact, desk.further)


def rules_diff(old: Path, new: Path) -> RulesDiff:
    """What differs, and what expires. Raises ConfigError."""
    return diff_rules(side(old), side(new))


def topics(
    settings: Settings, folder: Path, create: bool, partitions: int, replication: int
) -> Mapping[str, int | None]:
    """Every topic of the rule set with its partitions; None is missing. Raises ConfigError."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    answers = rule_set.rules.topics.answers
    names = (config.input_topic, *rule_set.output_topics, *([] if answers is None else [answers]))
    if create:
        create_topics(config, dict.fromkeys(names, partitions), replication)
    found = describe_topics(config, names)
    return {name: found.get(name) for name in names}


def load_rules(folder: Path) -> RuleSet:
    """Raises ConfigError."""
    return Desk.load(folder).rule_set


def export(settings: Settings, folder: Path, to: Path, what: Exported = "decisions") -> int:
    """Every decision of the decisions topic, one JSON line each; or every ticket that went to people, with its text, or
    every answer. How many there were. Raises ConfigError.
    """
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    topics, line_of = lines_of(what, rule_set, settings.max_ticket_bytes)
    reader = TopicReader(config.bootstrap_servers, config.properties)
    count = 0
    target = sys.stdout.buffer if str(to) == "-" else None
    try:
        with target or to.open("wb") as file:  # closing standard output is fine: nothing is written after
            for record in reader.records(topics):
                line = line_of(record)
                if line is not None:
                    file.write(line + b"\n")
                    count += 1
    except OSError as error:
        raise ConfigError(f"{to}: cannot be written: {error.strerror}") from error
    finally:
        reader.close()
    return count


def cache_stats(settings: Settings, folder: Path | None, at_most: int) -> redis_upkeep.Survey:
    """What is remembered in Redis, of one rule set or of all. Raises ConfigError."""
    return redis_upkeep.survey(_redis_url(settings), _rule_set_id(folder), at_most)


def cache_flush(settings: Settings, folder: Path | None, at_most: int) -> tuple[int, bool]:
    """Forgets it: how many entries, and whether that is all. Raises ConfigError."""
    return redis_upkeep.flush(_redis_url(settings), _rule_set_id(folder), at_most)


def _redis_url(settings: Settings) -> str:
    if settings.redis_url is None:
        raise ConfigError("no ROUTER_REDIS_URL: what a worker remembers by itself is gone when it ends")
    return settings.redis_url.get_secret_value()


def _rule_set_id(folder: Path | None) -> str | None:
    return None if folder is None else Desk.load(folder).rule_set.id


def send(settings: Settings, folder: Path, tickets: Path, limit: int | None) -> tuple[str, int]:
    """Puts the rows of a file on the input topic; its name, and how many. Raises ConfigError, StreamRetriable."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    messages = (as_message(row, number, rule_set, config.input_topic) for number, row in rows(tickets, ("text",)))
    planned = list(islice((message for message in messages if message is not None), limit))
    if describe_topics(config, [config.input_topic]).get(config.input_topic) is None:
        raise ConfigError(f"topic '{config.input_topic}' does not exist; `ticket-router topics --create` makes it")
    writer = TopicWriter(config.bootstrap_servers, config.properties)
    for message in planned:
        writer.write(message)
    writer.flush(WRITE_S)
    return config.input_topic, len(planned)


def audit(settings: Settings, folder: Path, since_ms: int | None) -> Ledger:
    """What became of the tickets that came in since then. Raises ConfigError, StreamRetriable."""
    rule_set = Desk.load(folder).rule_set
    config = wiring.kafka_config(settings, rule_set)
    ends = [topic for topic in rule_set.output_topics if topic != rule_set.decisions_topic]
    reader = TopicReader(config.bootstrap_servers, config.properties, config.group_id)
    try:
        for look in range(1, AUDIT_LOOKS + 1):
            begins = reader.begins([config.input_topic, *ends])
            committed = reader.committed(config.input_topic)
            tickets = reader.records([config.input_topic], since_ms=since_ms)
            outputs = reader.records(ends, since_ms=None if since_ms is None else max(0, since_ms - CLOCK_SKEW_MS))
            ledger = audit_topics(
                rule_set, tickets, outputs, committed, begins, lambda: reader.ends([config.input_topic])
            )
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
    topics = (rule_set.dead_letter_topic,) if dead_letters else rule_set.people_topics
    reader = TopicReader(config.bootstrap_servers, config.properties)
    try:
        sent_in = reader.records(
            [config.input_topic], since_ms=None if since_ms is None else max(0, since_ms - CLOCK_SKEW_MS)
        )
        records = reader.records(topics, since_ms=since_ms)
        partitions = describe_topics(config, [config.input_topic]).get(config.input_topic, 0)
        planned = plan_replay(records, sent_in, config.input_topic, partitions, dead_letters, selection)
    finally:
        reader.close()
    return planned if dry_run else _sent_in_again(planned, config)


def _sent_in_again(planned: Replay, config: KafkaConfig) -> Replay:
    """What was sent of it. Raises StreamRetriable."""
    writer = TopicWriter(config.bootstrap_servers, {**config.properties, "message.max.bytes": config.max_output_bytes})
    unwritable: dict[Resend, str] = {}
    for resend in planned.resends:
        try:
            writer.write(resend.output, resend.partition)
        except ConfigError as error:  # one of them must not keep back the others
            unwritable[resend] = f"{error} (ROUTER_MAX_OUTPUT_BYTES is {config.max_output_bytes})"
    writer.flush(WRITE_S)
    return planned.without(unwritable)
