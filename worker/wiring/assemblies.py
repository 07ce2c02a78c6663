"""The two processes that route: a worker on a stream, and a server over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from worker.core.policy import Calibration, NoCalibration, reason
from worker.core.turns import Turns
from worker.errors import ConfigError
from worker.ports import ScoreCache, TicketStream
from worker.runtime.asking import Patience
from worker.runtime.decide_server import DecideServer
from worker.runtime.http_edge import ServeLimits
from worker.runtime.journal import Journal
from worker.runtime.loop import Limits, Worker
from worker.runtime.question import Question
from worker.runtime.typed_questions import TypedQuestions
from worker.settings import Settings
from worker.telemetry import Metrics, Tracing
from worker.wiring.engines import EMBEDDED_IN_FLIGHT, Engines, tokenizer
from worker.wiring.questions import Calibrated
from worker.wiring.routing import Routing


def make_journal(settings: Settings, metrics: Metrics) -> Journal:
    return Journal(metrics, log_ticket_text=settings.log_ticket_text)


def check_exposure(settings: Settings) -> None:
    """Raises ConfigError where anybody on the network could ask without a token."""
    if settings.serve_token is None and not _only_this_machine(settings.serve_host):
        raise ConfigError(
            f"ROUTER_SERVE_HOST={settings.serve_host} lets other machines ask: set ROUTER_SERVE_TOKEN, which their "
            "requests must carry (`openssl rand -hex 32`)"
        )


def _only_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Assembly(Routing):
    """A worker with what has to be closed after it."""

    def __init__(
        self,
        settings: Settings,
        question: Question,
        calibration: Calibration | NoCalibration,
        *,
        engines: Engines,
        cache: ScoreCache,
        stream: TicketStream,
        secret: bytes,
        journal: Journal,
        tracing: Tracing,
        further: Sequence[Calibrated] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        rule_set = question.rule_set
        embedded = settings.engine == "llama_cpp"
        patience = Patience(
            attempts=settings.engine_attempts,
            deadline_s=settings.ticket_deadline_s,
            on_engine_down=settings.on_engine_down,
            max_wait_s=settings.max_wait_s,
        )
        super().__init__(
            settings,
            question,
            calibration,
            engines=engines,
            cache=cache,
            secret=secret,
            journal=journal,
            patience=patience,
            further=further,
            sleep=sleep,
        )
        self.worker = Worker(
            stream=stream,
            router=self.router,
            pool=self.pool,
            rule_set=rule_set,
            outputs=self.outputs,
            limits=Limits(
                max_in_flight=min(settings.max_in_flight, EMBEDDED_IN_FLIGHT) if embedded else settings.max_in_flight,
                max_in_flight_bytes=settings.max_in_flight_bytes,
                max_ticket_bytes=settings.max_ticket_bytes,
                settle_interval_s=settings.settle_interval_ms / 1000,
                drain_s=settings.drain_s,
                ticket_deadline_s=settings.ticket_deadline_s,
                stalled_s=settings.stalled_s,
                unassigned_s=settings.unassigned_s,
                dead_letter_limit=settings.dead_letter_limit,
            ),
            journal=journal,
            tracing=tracing,
            clock=time.monotonic,
            now=lambda: datetime.now(UTC),
            sleep=sleep,
        )

        journal.watch(self.worker.status, lambda: self.pool.is_up)
        journal.watch_endpoints(self.pool.names, self.pool.endpoint_is_up)
        journal.runs(rule_set, calibration)


class DecideAssembly(Routing):
    """A server over HTTP with what has to be closed after it."""

    def __init__(
        self,
        settings: Settings,
        question: Question,
        calibration: Calibration | NoCalibration,
        *,
        engines: Engines,
        cache: ScoreCache,
        secret: bytes,
        journal: Journal,
        turns: Turns | None,
        further: Sequence[Calibrated] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`turns` are those of `chat_turns`."""
        # Whoever asks waits: with the engine down there is nothing to wait for, and the client may come again.
        patience = Patience(
            attempts=settings.engine_attempts,
            deadline_s=settings.serve_deadline_s,
            on_engine_down="escalate",
            max_wait_s=0.0,
        )
        super().__init__(
            settings,
            question,
            calibration,
            engines=engines,
            cache=cache,
            secret=secret,
            journal=journal,
            patience=patience,
            further=further,
            sleep=sleep,
        )
        own_question = NoCalibration(reason("uncalibrated", detail="the request brings its own question"))
        embedded = settings.engine == "llama_cpp"
        most = settings.serve_concurrency
        token = settings.serve_token
        self.server = DecideServer(
            rule_set=question.rule_set,
            router=self.router,
            outputs=self.outputs,
            typed=TypedQuestions(
                turns=turns,
                tokenize=tokenizer(engines),
                context_tokens=question.identity.context_tokens,
                make_router=lambda rule_set, primitive: self.router_for(
                    replace(question, rule_set=rule_set, primitive=question.sent.wrapped(primitive)), own_question
                ),
            ),
            pool=self.pool,
            model=question.identity.model,
            limits=ServeLimits(
                max_requests=min(most, EMBEDDED_IN_FLIGHT) if embedded else most,
                max_body_bytes=settings.max_ticket_bytes,
                deadline_s=settings.serve_deadline_s,
                drain_s=settings.drain_s,
            ),
            token=token.get_secret_value() if token else None,
            journal=journal,
            clock=time.monotonic,
            now=lambda: datetime.now(UTC),
        )
        journal.watch_requests(lambda: self.server.status().in_flight, lambda: self.pool.is_up)
        journal.watch_endpoints(self.pool.names, self.pool.endpoint_is_up)
        journal.runs(question.rule_set, calibration)
