"""Composition root: settings to objects; the only module that names every concrete class."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, assert_never

from worker.adapters.files import calibration_file, load_artefact, load_rule_set
from worker.adapters.kafka import KafkaConfig, KafkaStream
from worker.adapters.llama_cpp import LlamaCppEngine
from worker.adapters.local_tokenizer import TokenizerFile
from worker.adapters.memory import MemoryCache
from worker.adapters.openai_compat import OpenAICompatEngine
from worker.adapters.redis_cache import RedisCache
from worker.adapters.sglang import SGLangEngine
from worker.adapters.systemone import SystemOneEngine
from worker.adapters.tiered_cache import TieredCache
from worker.adapters.writing import WritingClient
from worker.core.artefact import Artefact
from worker.core.cache_key import ScoreKey
from worker.core.labels import fit_to_tokenizer
from worker.core.modes import Mode
from worker.core.policy import Calibration, NoCalibration, calibration_in_force, reason
from worker.core.questions import FurtherQuestion
from worker.core.rules import RuleSet
from worker.core.steering import flagger_for
from worker.core.topics import topic_name
from worker.core.turns import Tokenize, Turns
from worker.errors import ConfigError, EngineError, EngineUnavailable
from worker.ports import ScoreCache, ScoringEngine, TicketStream
from worker.runtime.asking import Asker, Patience
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.canary import Canaries, Canary, find_canaries
from worker.runtime.decide_server import DecideServer
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.http_edge import ServeLimits
from worker.runtime.journal import Journal
from worker.runtime.limiter import BatchSize, RetryBudget
from worker.runtime.loop import Limits, Worker
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.question import Question, check_easy_tickets, easy_tickets, prepare_further, prepare_question
from worker.runtime.quota import TenantQuota
from worker.runtime.router import Asked, Router, Safeguards
from worker.runtime.sent import Sent
from worker.runtime.typed_questions import TypedQuestions
from worker.settings import Settings
from worker.telemetry import Metrics, Tracing, kafka_logger

ENGINE_RETRY_S = 2.0
MEMORY_CACHE_ENTRIES = 100_000
NEAR_TTL_S = 300
"""What is forgotten in Redis (`cache flush`) is forgotten by every worker within it."""
EMBEDDED_IN_FLIGHT = 16
"""The embedded engine scores one ticket after the other: more in flight would only wait towards their deadline."""


Engines = Sequence[tuple[str, ScoringEngine]]
"""Engines with the names under which logs and metrics know them."""


@dataclass(frozen=True, slots=True)
class Desk:
    """A rule set folder as loaded: rules, and the calibrations as they were found."""

    folder: Path
    rule_set: RuleSet
    artefact: Artefact | None
    further: Mapping[str, Artefact | None] = field(default_factory=dict)
    """Of the further questions, by id."""

    @classmethod
    def load(cls, folder: Path) -> Desk:
        """Raises RuleSetError, ArtefactError."""
        rule_set = load_rule_set(folder)
        further = {q.id: load_artefact(folder / calibration_file(q.id)) for q in rule_set.questions.questions}
        return cls(folder, rule_set, load_artefact(folder / calibration_file()), further)

    def at_most(self, mode: Mode) -> Desk:
        """The same with no category in a less strict mode than this."""
        return replace(self, rule_set=self.rule_set.at_most(mode))

    def question(self, question_id: str) -> FurtherQuestion:
        """One of the further questions. Raises ConfigError."""
        return _further_question(self.rule_set, question_id)


def _further_question(rule_set: RuleSet, question_id: str) -> FurtherQuestion:
    found = rule_set.questions.by_id(question_id)
    if found is None:
        known = ", ".join(q.id for q in rule_set.questions.questions) or "there is no questions.yaml"
        raise ConfigError(f"rule set '{rule_set.id}' has no question '{question_id}' ({known})")
    return found


def make_engines(settings: Settings) -> Engines:
    """The engines that the settings name, by name. Raises ConfigError. Nothing is connected to yet."""
    if settings.engine == "llama_cpp":
        return [("embedded", LlamaCppEngine(settings.engine_model_path, threads=settings.engine_threads))]
    urls = [url.strip() for url in (settings.engine_url or "").split(",") if url.strip()]
    if not urls:
        raise ConfigError(
            "no engine: set ROUTER_ENGINE_URL to a server, and ROUTER_ENGINE to what it is (sglang, openai_compat, "
            "systemone), or ROUTER_ENGINE=llama_cpp for the embedded model"
        )
    # Named by number, never by address: names go into logs and metrics.
    return [(f"engine-{number}", _engine_at(url, settings)) for number, url in enumerate(urls, 1)]


def _engine_at(url: str, settings: Settings) -> ScoringEngine:
    key = settings.engine_api_key
    api_key = key.get_secret_value() if key else None
    connections, timeout_s = settings.engine_connections, settings.engine_timeout_s
    model, ca_file = settings.engine_model, settings.engine_ca_file
    match settings.engine:
        case "openai_compat":
            return OpenAICompatEngine(
                url, model=model, api_key=api_key, connections=connections, timeout_s=timeout_s, ca_file=ca_file
            )
        case "systemone":
            return SystemOneEngine(
                url, model=model, api_key=api_key, connections=connections, timeout_s=timeout_s, ca_file=ca_file
            )
        case "sglang" | "llama_cpp":
            return SGLangEngine(url, api_key=api_key, connections=connections, timeout_s=timeout_s, ca_file=ca_file)
        case _:
            assert_never(settings.engine)


async def make_writer(settings: Settings, engine: ScoringEngine) -> WritingClient:
    """What writes answers with the model behind `engine`, for a benchmark. Raises ConfigError."""
    if isinstance(engine, LlamaCppEngine):
        address, key = await engine.server()
        return WritingClient(address, api_key=key)
    if settings.engine == "systemone":
        raise ConfigError("a decision API writes nothing: set ROUTER_ENGINE to sglang, openai_compat or llama_cpp")
    url = (settings.engine_url or "").split(",")[0]
    secret = settings.engine_api_key
    return WritingClient(
        url,
        model=settings.engine_model,
        api_key=secret.get_secret_value() if secret else None,
        ca_file=settings.engine_ca_file,
    )


def batch_items(settings: Settings) -> int:
    """How many tickets one call of the engine carries: engines that take them one by one gain nothing from more."""
    return 1 if settings.engine in ("llama_cpp", "systemone") else settings.batch_items


def make_journal(settings: Settings, metrics: Metrics) -> Journal:
    return Journal(metrics, log_ticket_text=settings.log_ticket_text)


def make_cache(
    settings: Settings, secret: bytes, on_trouble: Callable[[str | None], None] = lambda _: None
) -> ScoreCache:
    """A bounded memory of this process, in front of Redis where one is named, whose trouble `on_trouble` is told."""
    shared = settings.redis_url is not None
    near = MemoryCache(
        max_entries=MEMORY_CACHE_ENTRIES,
        max_bytes=settings.cache_memory_bytes,
        ttl_s=min(settings.cache_ttl_s, NEAR_TTL_S) if shared else settings.cache_ttl_s,
        clock=time.monotonic,
    )
    if settings.redis_url is None:
        return near
    far = RedisCache(
        settings.redis_url.get_secret_value(),
        secret=secret,
        owner=secrets.token_bytes(8),
        ttl_s=settings.cache_ttl_s,
        timeout_s=settings.redis_timeout_ms / 1000,
        clock=time.monotonic,
        on_trouble=on_trouble,
    )
    return TieredCache(near, far)


def _counters(cache: ScoreCache) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Those of the memory, and those of Redis; empty where there is none."""
    near, far = (cache.near, cache.far) if isinstance(cache, TieredCache) else (cache, None)
    return (
        near.counters if isinstance(near, MemoryCache) else {},
        far.counters if isinstance(far, RedisCache) else {},
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
    """Raises ConfigError where no broker is named, or the input topic is none or would be fed by the worker itself."""
    if settings.kafka_bootstrap_servers is None:
        raise ConfigError("no broker: set ROUTER_KAFKA_BOOTSTRAP_SERVERS, such as localhost:9092")
    input_topic = settings.kafka_input_topic or rule_set.input_topic
    try:
        topic_name(input_topic)
    except ValueError as error:
        raise ConfigError(
            f"ROUTER_KAFKA_INPUT_TOPIC {input_topic[:300]!r}: {error}. A pattern, such as one that begins with '^', "
            "could match the worker's own outputs: run one worker for each topic"
        ) from error
    if input_topic in (*rule_set.output_topics, rule_set.rules.topics.answers):
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


def make_sent(settings: Settings) -> Sent:
    """How questions go to the engine. Raises ConfigError on a file that is no tokenizer."""
    if settings.tokenizer_file is None:
        return Sent()
    if settings.engine == "systemone":
        raise ConfigError("a decision API has no tokens: unset ROUTER_TOKENIZER_FILE, or use another engine")
    return Sent(TokenizerFile(settings.tokenizer_file), settings.send_ids)


async def ask_once(
    rule_set: RuleSet, engine: ScoringEngine, further: str | None = None, sent: Sent | None = None
) -> Question:
    """Prepares the rule set's own question, or the further one of that id.

    Raises ConfigError, LabelError, and ConfigError too where there is no such question or the engine is away.
    """
    asked = None if further is None else _further_question(rule_set, further)
    try:
        question = await prepare_question(rule_set, engine, sent)
        return question if asked is None else await prepare_further(question, asked, engine)
    except EngineError as error:
        raise ConfigError(f"the engine cannot be asked: {error}") from error


async def ask_until_available(
    rule_set: RuleSet, engines: Engines, waiting: Callable[[str], None], sent: Sent | None = None
) -> Question:
    """Prepares the question with the first engine that answers, for as long as they take to come up.

    Raises ConfigError, LabelError, and ConfigError where two engines do not run the same model.
    """
    while True:
        asked: list[tuple[str, Question]] = []
        troubles = []
        for name, engine in engines:
            try:
                asked.append((name, await prepare_question(rule_set, engine, sent)))
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


Calibrated = tuple[Question, Calibration | NoCalibration]
"""A question with the calibration under which its answers are read."""


async def further_for(
    desk: Desk, question: Question, engines: Engines, waiting: Callable[[str], None]
) -> tuple[Calibrated, ...]:
    """The rule set's further questions, each with its own calibration, for as long as the engines take to answer.

    Raises LabelError, PromptError.
    """
    found: list[Calibrated] = []
    wanted = desk.rule_set.questions.questions
    while len(found) < len(wanted):
        further = wanted[len(found)]
        for name, engine in engines:
            try:
                asked = await prepare_further(question, further, engine)
            except EngineError as error:
                waiting(f"{name}: {error}")
                continue
            own = Desk(desk.folder, asked.rule_set, desk.further.get(further.id))
            found.append((asked, await calibration_for(own, asked, engines, waiting)))
            break
        else:
            await asyncio.sleep(ENGINE_RETRY_S)
    return tuple(found)


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


def tokenizer(engines: Engines) -> Tokenize:
    """The tokenizer of the first engine that answers; all run the same model."""

    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        for number, (_, engine) in enumerate(engines, 1):
            try:
                return await engine.tokenize(texts)
            except EngineUnavailable:
                if number == len(engines):
                    raise
        raise EngineUnavailable("there is no engine")

    return tokenize


async def chat_turns(rule_set: RuleSet, engines: Engines, waiting: Callable[[str], None]) -> Turns | None:
    """The turns that the rule set's prompt has, None where it is one for a base model. Raises PromptError."""
    while True:
        try:
            style = (await fit_to_tokenizer(rule_set.categories, tokenizer(engines))).prompt
        except EngineError as error:
            waiting(str(error))
            await asyncio.sleep(ENGINE_RETRY_S)
        else:
            return style.chat_turns if style.style == "chat" else None


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


def _digest(calibration: Calibration | NoCalibration) -> str | None:
    return calibration.artefact.digest if isinstance(calibration, Calibration) else None


async def canaries_for(question: Question, engines: Engines, waiting: Callable[[str], None]) -> tuple[Canary, ...]:
    """Tickets with known scores, asked about alone with the first engine that answers; () where there are none."""
    texts = [text for _, text in easy_tickets(question.rule_set)]
    while True:
        for name, engine in engines:
            try:
                return await find_canaries(question.primitive, texts, engine)
            except EngineError as error:
                waiting(f"{name}: {error}")
        await asyncio.sleep(ENGINE_RETRY_S)


class Routing:
    """What decides about tickets, wherever they come from, with what has to be closed after it."""

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
        patience: Patience,
        further: Sequence[Calibrated] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        rule_set = question.rule_set
        embedded = settings.engine == "llama_cpp"
        health = Health(concurrency=1 if embedded else settings.batch_concurrency)
        size = BatchSize(batch_items(settings), 2 * health.latency_target_s)
        self.pool = EnginePool(
            engines,
            question.primitive.request(rule_set.categories.categories[0].description),
            question.identity,
            health,
            clock=time.monotonic,
            sleep=sleep,
            on_change=journal.engine_changed,
            on_call=journal.engine_called,
            on_rows=journal.rows_checked,
            on_answer=size.answered,
        )
        self._batcher = Batcher(
            self.pool.score,
            # One after the other, the questions about a ticket find what llama.cpp still holds of its prompt.
            max_items=batch_items(settings),
            max_wait_s=settings.batch_wait_ms / 1000,
            concurrency=settings.batch_concurrency * len(engines),
            size=lambda: size.limit,
            ask_alone=self.pool.score_alone,
        )
        self._cache = CacheBatch(cache, sleep=sleep)
        self._secret = secret
        self._patience = patience
        self._question = question
        self._engines = engines
        self._journal = journal
        # The embedded engine scores one ticket after the other: it has no rows to mix up, and no time to spare.
        self._watches_rows = not embedded
        self._budget = RetryBudget(time.monotonic)
        self._sleep = sleep
        self.router = self.router_for(question, calibration, further, self._safeguards(further))
        provenance = Provenance(
            engine=question.identity.engine,
            model=question.identity.model,
            calibration=_digest(calibration),
            further=tuple(_digest(own) for _, own in further),
        )
        self.outputs = Outputs(rule_set, provenance)
        journal.watch_cache(*_counters(cache), self._cache.counters)

    def _safeguards(self, further: Sequence[Calibrated]) -> Safeguards:
        """What stands between the authors of tickets and the rule set's decisions."""
        question, rules = self._question, self._question.rule_set.rules
        # All questions are asked about the same text, so that an engine that keeps its state computes it once.
        budgets = [one.budget for one in (question, *(asked for asked, _ in further)) if one.budget is not None]
        least = min(budgets, key=lambda budget: budget.tokens, default=None)
        other, quota = question.other_order, rules.length.tenant_characters_per_minute
        return Safeguards(
            reader=None if least is None else replace(question, budget=least).reader(tokenizer(self._engines)),
            flagger=flagger_for(question.rule_set) if rules.steering.recheck_share > 0 else None,
            other_order=None if other is None else (other.primitive, self._cache_key(other)),
            quota=None if quota is None else TenantQuota(quota, time.monotonic),
            on_checked=self._journal.checked,
        )

    def router_for(
        self,
        question: Question,
        calibration: Calibration | NoCalibration,
        further: Sequence[Calibrated] = (),
        safeguards: Safeguards | None = None,
    ) -> Router:
        """Another router over the same cache, batches and engines."""
        return Router(
            rule_set=question.rule_set,
            primitive=question.primitive,
            calibration=calibration,
            asker=Asker(
                cache=self._cache,
                batcher=self._batcher,
                pool=self.pool,
                budget=self._budget,
                patience=self._patience,
                clock=time.monotonic,
                sleep=self._sleep,
                jitter=random.random,
            ),
            clock=time.monotonic,
            cache_key=self._cache_key(question),
            further=[
                Asked(asked.behind.question, asked.primitive, own, self._cache_key(asked))
                for asked, own in further
                if asked.behind is not None
            ],
            safeguards=safeguards,
        )

    def _cache_key(self, question: Question) -> ScoreKey:
        prints = question.fingerprints
        return ScoreKey(
            self._secret,
            rule_set=self._question.rule_set.id,
            model=prints.model,
            tokenizer=prints.tokenizer,
            prompt=prints.prompt,
            label_token_ids=question.primitive.token_ids,
            category_set=prints.categories,
            normaliser=prints.normaliser,
        )

    async def __aenter__(self) -> Self:
        if self._watches_rows:
            known = await canaries_for(self._question, self._engines, self._journal.waiting)
            if known:
                self.pool.watch_rows(Canaries(known, random.random))
            else:
                self._journal.rows_unwatched(
                    "the model answers no two of the rule set's examples clearly differently, so that an engine which "
                    "mixed up the rows of its answers could not be told"
                )
        self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._batcher.aclose()
        await self._cache.aclose()
        await self.pool.aclose()


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
