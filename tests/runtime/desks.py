"""Whole workers over memory adapters, for tests of the loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import orjson

from tests.core.sets import artefact, rule_set
from tests.runtime.engines import IDENTITY, ScriptedEngine
from worker.adapters.memory import MemoryBroker, MemoryCache, MemoryStream
from worker.core.labels import Labels
from worker.core.policy import Calibration
from worker.core.primitives import ChooseOne
from worker.core.prompt import Prompt
from worker.core.rules import RuleSet
from worker.ports import ScoreCache
from worker.runtime.asking import Asker, Patience
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.journal import Journal
from worker.runtime.limiter import RetryBudget
from worker.runtime.loop import Limits, Worker
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.router import Router
from worker.telemetry import Metrics, NoTracing, Tracing

RULES = rule_set()
OUTPUTS = dict.fromkeys(RULES.output_topics, 1)
ENDS = [topic for topic in RULES.output_topics if topic != RULES.decisions_topic]


def broker(partitions: int = 3, rules: RuleSet = RULES, **options: object) -> MemoryBroker:
    topics = {rules.input_topic: partitions, **dict.fromkeys(rules.output_topics, 1)}
    return MemoryBroker(topics, **options)  # type: ignore[arg-type]


def make_worker(
    on: MemoryBroker,
    engine: ScriptedEngine,
    *,
    rules: RuleSet = RULES,
    limits: Limits | None = None,
    patience: Patience | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    metrics: Metrics | None = None,
    stream: MemoryStream | None = None,
    cache: ScoreCache | None = None,
    tracing: Tracing | None = None,
) -> Worker:
    """A worker with everything real but the broker, the engine and the cache."""
    primitive = ChooseOne(Prompt("p", "\n:"), Labels(("a", "b", "c"), (1, 2, 3)))
    journal = Journal(metrics or Metrics(), log_ticket_text=False)
    pool = EnginePool(
        [("one", engine)],
        primitive.request("probe"),
        IDENTITY,
        Health(probe_interval_s=0.02),
        clock=time.monotonic,
        sleep=sleep,
        on_change=journal.engine_changed,
        on_call=journal.engine_called,
    )
    made = artefact(rules)
    router = Router(
        rule_set=rules,
        primitive=primitive,
        calibration=Calibration(made),
        asker=Asker(
            cache=CacheBatch(cache or MemoryCache()),
            batcher=Batcher(pool.score, max_items=8, max_wait_s=0.001, concurrency=4),
            pool=pool,
            budget=RetryBudget(time.monotonic, share=1.0),
            patience=patience or Patience(first_backoff_s=0.01),
            clock=time.monotonic,
            sleep=sleep,
            jitter=random.random,
        ),
        clock=time.monotonic,
        cache_key=lambda tenant, text: f"{tenant}/{text}",
    )
    return Worker(
        stream=stream or MemoryStream(on, rules.input_topic),
        router=router,
        pool=pool,
        rule_set=rules,
        outputs=Outputs(rules, Provenance("scripted", "m", made.digest)),
        limits=limits or Limits(settle_interval_s=0.01, drain_s=5.0, revoke_s=0.2),
        journal=journal,
        tracing=tracing or NoTracing(),
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
        sleep=sleep,
    )


def send(on: MemoryBroker, count: int, *, keys: int = 10, first: int = 0, rules: RuleSet = RULES) -> list[str]:
    """Tickets t0, t1, ... whose text names their label; their ids."""
    ids = [f"t{n}" for n in range(first, first + count)]
    for n, ticket_id in enumerate(ids, first):
        body = orjson.dumps({"id": ticket_id, "text": f"label {n % 3} {n}"})
        on.produce(rules.input_topic, f"k{n % keys}".encode(), body)
    return ids


def ends(on: MemoryBroker, rules: RuleSet = RULES) -> dict[str, list[str]]:
    """Ticket id to the topics in which it ended, one for each copy."""
    found: dict[str, list[str]] = defaultdict(list)
    for topic in rules.output_topics:
        if topic != rules.decisions_topic:
            for record in on.records(topic):
                found[_id(record.value)].append(topic)
    return found


def _id(value: bytes | None) -> str:
    """`?` for what is no ticket."""
    try:
        return str(orjson.loads(value or b"")["id"])
    except (ValueError, TypeError, KeyError):
        return "?"
