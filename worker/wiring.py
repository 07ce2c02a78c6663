"""Composition root: settings to objects; the only module that names every concrete class."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from worker.adapters.files import CALIBRATION_FILE, load_artefact, load_rule_set
from worker.adapters.kafka import KafkaConfig, KafkaStream
from worker.adapters.llama_cpp import LlamaCppEngine
from worker.adapters.memory import MemoryCache
from worker.adapters.redis_cache import RedisCache
from worker.adapters.sglang import SGLangEngine
from worker.core.artefact import Artefact
from worker.core.cache_key import ScoreKey
from worker.core.policy import Calibration, NoCalibration, calibration_in_force, reason
from worker.core.rules import RuleSet
from worker.errors import ConfigError, EngineError
from worker.ports import ScoreCache, ScoringEngine, TicketStream
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.journal import Journal
from worker.runtime.limiter import RetryBudget
from worker.runtime.loop import Limits, Worker
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.question import Question, check_easy_tickets, prepare_question
from worker.runtime.router import Patience, Router
from worker.settings import Settings
from worker.telemetry import Metrics, Tracing, kafka_logger

ENGINE_RETRY_S = 2.0
MEMORY_CACHE_ENTRIES = 100_000
EMBEDDED_IN_FLIGHT = 16
"""The embedded engine scores one ticket after the other: more in flight would only wait towards their deadline."""


Engines = Sequence[tuple[str, ScoringEngine]]
"""Engines with the names under which logs and metrics know them."""


@dataclass(frozen=True, slots=True)
class Desk:
    """A rule set folder as loaded: rules, and the calibration as it was found."""

    folder: Path
    rule_set: RuleSet
    artefact: Artefact | None

    @classmethod
    def load(cls, folder: Path) -> Desk:
        """Raises RuleSetError, ArtefactError."""
        return cls(folder, load_rule_set(folder), load_artefact(folder / CALIBRATION_FILE))


def make_engines(settings: Settings) -> Engines:
    """The engines that the settings name, by name. Raises ConfigError. Nothing is connected to yet."""
    if settings.engine == "llama_cpp":
        return [("embedded", LlamaCppEngine(settings.engine_model_path, threads=settings.engine_threads))]
    urls = [url.strip() for url in (settings.engine_url or "").split(",") if url.strip()]
    if not urls:
        raise ConfigError(
            "no engine: set ROUTER_ENGINE_URL to an SGLang server, or ROUTER_ENGINE=llama_cpp for the embedded model"
        )
    key = settings.engine_api_key
    return [
        (
            f"engine-{number}",  # never the address: names go into logs and metrics
            SGLangEngine(
                url,
                api_key=key.get_secret_value() if key else None,
                connections=settings.engine_connections,
                timeout_s=settings.engine_timeout_s,
            ),
        )
        for number, url in enumerate(urls, 1)
    ]


def make_journal(settings: Settings, metrics: Metrics) -> Journal:
    return Journal(metrics, log_ticket_text=settings.log_ticket_text)


def make_cache(settings: Settings, secret: bytes) -> ScoreCache:
    """Redis where one is named, else a bounded memory of this process."""
    if settings.redis_url is None:
        return MemoryCache(max_entries=MEMORY_CACHE_ENTRIES, ttl_s=settings.cache_ttl_s, clock=time.monotonic)
    return RedisCache(
        settings.redis_url.get_secret_value(),
        secret=secret,
        ttl_s=settings.cache_ttl_s,
        timeout_s=settings.redis_timeout_ms / 1000,
        clock=time.monotonic,
    )


def cache_secret(settings: Settings) -> bytes:
    """The secret of keys and values. Raises ConfigError where a shared cache has none."""
    if settings.cache_secret is not None:
        return settings.cache_secret.get_secret_value().encode()
    if settings.redis_url is not None:
        raise ConfigError(
            "ROUTER_REDIS_URL is set without ROUTER_CACHE_SECRET: anybody who can write to Redis could then steer "
            "tickets; set it to the same random string on every worker (`openssl rand -hex 32`)"
        )
    return secrets.token_bytes(32)


def kafka_config(settings: Settings, rule_set: RuleSet) -> KafkaConfig:
    """Raises ConfigError where no broker is named."""
    if settings.kafka_bootstrap_servers is None:
        raise ConfigError("no broker: set ROUTER_KAFKA_BOOTSTRAP_SERVERS, such as localhost:9092")
    input_topic = settings.kafka_input_topic or rule_set.input_topic
    if input_topic in rule_set.output_topics:
        raise ConfigError(f"topic '{input_topic}' is input and output: every ticket would go round for ever")
    return KafkaConfig(
        bootstrap_servers=settings.kafka_bootstrap_servers,
        input_topic=input_topic,
        group_id=settings.kafka_group_id or f"ticket-router.{rule_set.id}",
        delivery=settings.delivery,
        session_timeout_ms=settings.kafka_session_timeout_ms,
        assignment_strategy=settings.kafka_assignment_strategy,
        group_protocol=settings.kafka_group_protocol,
        group_instance_id=settings.kafka_group_instance_id,
        max_output_bytes=settings.max_output_bytes,
        properties=settings.kafka_properties,
    )


def make_stream(settings: Settings, rule_set: RuleSet) -> TicketStream:
    """Raises ConfigError; connects only when it is opened."""
    return KafkaStream(kafka_config(settings, rule_set), logger=kafka_logger())


async def ask_once(rule_set: RuleSet, engine: ScoringEngine) -> Question:
    """Prepares the question. Raises ConfigError, LabelError, and ConfigError too where the engine is away."""
    try:
        return await prepare_question(rule_set, engine)
    except EngineError as error:
        raise ConfigError(f"the engine cannot be asked: {error}") from error


async def ask_until_available(rule_set: RuleSet, engines: Engines, waiting: Callable[[str], None]) -> Question:
    """Prepares the question with the first engine that answers, for as long as they take to come up.

    Raises ConfigError, LabelError, and ConfigError where two engines do not run the same model.
    """
    while True:
        asked: list[tuple[str, Question]] = []
        troubles = []
        for name, engine in engines:
            try:
                asked.append((name, await prepare_question(rule_set, engine)))
            except EngineError as error:
                troubles.append(f"{name}: {error}")
        if asked:
            name, question = asked[0]
            for other, another in asked[1:]:
                if another.fingerprints != question.fingerprints:
                    differ = ", ".join(question.fingerprints.differences(another.fingerprints))
                    raise ConfigError(f"{name} and {other} do not score alike (different: {differ}); use one model")
            return question
        waiting("; ".join(troubles))
        await asyncio.sleep(ENGINE_RETRY_S)


async def calibration_for(
    desk: Desk, question: Question, engines: Engines, waiting: Callable[[str], None]
) -> Calibration | NoCalibration:
    """The calibration in force, if an engine passes the check on easy tickets."""
    floor = desk.rule_set.rules.gates.min_label_mass
    while True:
        for name, engine in engines:
            try:
                problem = (await check_easy_tickets(question, engine)).problem(floor)
            except EngineError as error:
                waiting(f"{name}: {error}")
                continue
            if problem is not None:
                return NoCalibration(reason("labels_untrusted", detail=problem))
            return calibration_in_force(desk.artefact, question.fingerprints)
        await asyncio.sleep(ENGINE_RETRY_S)


class Assembly:
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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        rule_set = question.rule_set
        embedded = settings.engine == "llama_cpp"
        self.pool = EnginePool(
            engines,
            question.primitive.request(rule_set.categories.categories[0].description),
            question.identity,
            Health(concurrency=1 if embedded else settings.batch_concurrency),
            clock=time.monotonic,
            sleep=sleep,
            on_change=journal.engine_changed,
            on_call=journal.engine_called,
        )
        self._batcher = Batcher(
            self.pool.score,
            max_items=settings.batch_items,
            max_wait_s=settings.batch_wait_ms / 1000,
            concurrency=settings.batch_concurrency * len(engines),
        )
        self._cache = CacheBatch(cache)
        prints = question.fingerprints
        router = Router(
            rule_set=rule_set,
            primitive=question.primitive,
            calibration=calibration,
            cache=self._cache,
            cache_key=ScoreKey(
                secret,
                model=prints.model,
                tokenizer=prints.tokenizer,
                prompt=prints.prompt,
                label_token_ids=question.primitive.labels.token_ids,
                category_set=prints.categories,
            ),
            batcher=self._batcher,
            pool=self.pool,
            budget=RetryBudget(time.monotonic),
            patience=Patience(
                attempts=settings.engine_attempts,
                deadline_s=settings.ticket_deadline_s,
                on_engine_down=settings.on_engine_down,
                max_wait_s=settings.max_wait_s,
            ),
            clock=time.monotonic,
            sleep=sleep,
            jitter=random.random,
        )
        provenance = Provenance(
            engine=question.identity.engine,
            model=question.identity.model,
            calibration=calibration.artefact.digest if isinstance(calibration, Calibration) else None,
        )
        self.worker = Worker(
            stream=stream,
            router=router,
            pool=self.pool,
            rule_set=rule_set,
            outputs=Outputs(rule_set, provenance),
            limits=Limits(
                max_in_flight=min(settings.max_in_flight, EMBEDDED_IN_FLIGHT) if embedded else settings.max_in_flight,
                max_in_flight_bytes=settings.max_in_flight_bytes,
                max_ticket_bytes=settings.max_ticket_bytes,
                settle_interval_s=settings.settle_interval_ms / 1000,
                drain_s=settings.drain_s,
            ),
            journal=journal,
            tracing=tracing,
            clock=time.monotonic,
            now=lambda: datetime.now(UTC),
        )

        journal.watch(self.worker.status, lambda: self.pool.is_up)
        if isinstance(cache, RedisCache):
            journal.watch_cache(cache.counters)

    async def __aenter__(self) -> Assembly:
        self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._batcher.aclose()
        await self._cache.aclose()
        await self.pool.aclose()
