"""What runs until it is told to stop: the worker, and decisions over HTTP, each with health port, logs and export."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from worker import wiring
from worker.adapters.kafka_topics import require_topics
from worker.core.policy import Calibration, NoCalibration
from worker.runtime.http import Condition, HealthServer
from worker.runtime.question import Question
from worker.runtime.service import Stoppable, keep_freed_memory, spare_the_collector, until_signalled
from worker.settings import Settings
from worker.telemetry import LOG_LINES_DROPPED, LogSink, Metrics, set_up_logging, start_export
from worker.wiring import Assembly, DecideAssembly, Desk

EXPORT_CLOSE_S = 3.0


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
        self.journal.belongs_to(desk.rule_set)
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

    async def open_health_port(self) -> None:
        await self._health.start(self._settings.http_host, self._settings.http_port)

    async def questions(self) -> tuple[Question, Calibration | NoCalibration, tuple[wiring.Calibrated, ...]]:
        """Waits for an engine, and says what it is asked under which calibrations."""
        self.starting(wiring.first_step(self._settings))
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
        self.journal.ends()
        self._log_sink.gather_no_more()
        await self._health.aclose()
        await self.cache.aclose()
        await wiring.close_engines(self.engines)
        await asyncio.to_thread(self.export.close, EXPORT_CLOSE_S)

    def _condition_now(self) -> Condition | None:
        return self.condition()

    def starting(self, what: str) -> None:
        self.journal.starting(what)
        self._waiting_for = what

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
    """The worker as a process: health port first, then a look at the topics, then the engine, which may have a model to
    load, then the stream. Raises RouterError where it must end.
    """
    desk = Desk.load(folder).at_most(settings.mode)
    secret = wiring.cache_secret(settings)
    config = wiring.kafka_config(settings, desk.rule_set)
    stream = wiring.make_stream(settings, desk.rule_set)
    process = _Process(settings, desk, secret, log_sink, joins_a_group=True)

    async def work(announce: Callable[[Stoppable], None]) -> None:
        await process.open_health_port()
        process.starting("looking for its topics on Kafka")
        await asyncio.to_thread(require_topics, config, desk.rule_set.output_topics)
        question, calibration, further = await process.questions()
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
        await process.open_health_port()
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
