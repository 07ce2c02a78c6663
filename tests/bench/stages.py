"""What each stage of a ticket costs by itself, in microseconds of one core; telemetry above all."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Literal

import structlog

from tests.bench.tickets import CATEGORIES, ticket_bytes
from tests.core.sets import artefact, rule_set
from worker.adapters.sglang_wire import score_body
from worker.core.cache_key import ScoreKey
from worker.core.policy import Calibration, decide
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.steering import flagger_for
from worker.core.ticket import parse_ticket
from worker.ports import Delivery, Partition
from worker.runtime.journal import Journal
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.router import Routed
from worker.telemetry import DECISIONS, TICKET_LATENCY, Export, Metrics, set_up_logging, start_export

ITEMS = 32


@dataclass(frozen=True, slots=True)
class Stage:
    """`us` is CPU time of this process for one ticket."""

    name: str
    us: float


def run(collector_url: str, rounds: int) -> list[Stage]:
    """Through the worker's own parts, on the benchmark's tickets."""
    rules = rule_set(*CATEGORIES)
    calibration = Calibration(artefact(rules))
    values = list(ticket_bytes(512))
    intake, canonicalise = rules.rules.intake, rules.categories.prompt.canonicalise
    tickets = [parse_ticket(value, intake, 500_000, canonicalise) for value in values]
    scores = LabelScores.from_logprobs((-0.2, -2.5, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0))
    delivery = Delivery(Partition("bench", 0), 1, 1, b"k1", values[0], (), 0)
    key = ScoreKey(
        b"a secret for benchmarks",
        rule_set=rules.id,
        model="m" * 40,
        tokenizer="t" * 40,
        prompt="p" * 40,
        label_token_ids=range(8),
        category_set="c" * 40,
        normaliser="n" * 40,
    )
    outputs = Outputs(rules, Provenance("sglang", "m", calibration.artefact.digest))
    decision = decide(scores, rules, calibration)
    unsure = decide(LabelScores.from_logprobs((-2.2,) * len(CATEGORIES)), rules, calibration)
    decided_at = datetime.now(UTC).isoformat()
    envelope = outputs.envelope(delivery, tickets[0], Routed(decision, score_s=0.02), decided_at, 0.021)
    prefix = "Sort the tickets. " * 100
    batch = [ScoreRequest(prefix, f" {ticket.text}\n:", tuple(range(8))) for ticket in tickets[:ITEMS]]
    flagger = flagger_for(rules)
    turn = count()
    metrics = Metrics()
    exports: list[Export] = []

    def export(ratio: str) -> Callable[[], object]:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector_url,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": ratio,
            "OTEL_METRICS_EXPORTER": "none",
        }
        started = start_export(environ, metrics, resource={}, clock=time.monotonic, chance=random.random)
        exports.append(started)

        def span() -> None:
            begun = started.tracing.begin(())
            if begun is not None:
                begun.set("ticket_router.action", "route")
                begun.set("ticket_router.reason", "certified")
                begun.set("ticket_router.decision_id", envelope.decision_id)
                begun.end()

        return span

    def publish(routed: Routed) -> None:
        made = outputs.envelope(delivery, tickets[0], routed, decided_at, 0.021)
        outputs.decided(delivery, made, tickets[0])

    def counted() -> None:
        metrics.add(DECISIONS, "route", "billing", "certified")

    def one(work: Callable[[int], object]) -> Callable[[], object]:
        return lambda: work(next(turn) % len(values))

    with _journal(metrics, "info") as full, _journal(metrics, "warning") as quiet:
        ways: list[tuple[str, Callable[[], object]]] = [
            ("nothing (the loop that measures)", one(lambda n: None)),
            (
                "parse a ticket of 280 bytes",
                one(lambda n: parse_ticket(values[n], intake, 500_000, canonicalise)),
            ),
            ("look for what addresses the router", one(lambda n: flagger.find(tickets[n].text))),
            ("cache key", one(lambda n: key(tickets[n].tenant, tickets[n].text))),
            (f"body of a request, of {ITEMS}", lambda: score_body(batch)),
            ("decide", lambda: decide(scores, rules, calibration)),
            ("envelope and its two messages, routed", lambda: publish(Routed(decision, score_s=0.02))),
            ("the same for people, with a card", lambda: publish(Routed(unsure, score_s=0.02))),
            ("one counter", counted),
            ("one histogram", lambda: metrics.observe(TICKET_LATENCY, 0.021)),
            ("a decision's metrics, without a log line", lambda: quiet.decided(delivery, tickets[0], envelope)),
            ("a decision's metrics and log line", lambda: full.decided(delivery, tickets[0], envelope)),
            ("span, 1 % sampled", export("0.01")),
            ("span, every ticket", export("1.0")),
        ]
        try:
            return [_stage(name, way, rounds) for name, way in ways]
        finally:
            for each in exports:
                each.close(1.0)


def _stage(name: str, way: Callable[[], object], rounds: int) -> Stage:
    """The best of three, which something else on the machine disturbed least."""
    best = math.inf
    for _ in range(3):
        began = time.process_time()
        for _ in range(rounds):
            way()
        best = min(best, time.process_time() - began)
    tickets = rounds * (ITEMS if name.endswith(f"of {ITEMS}") else 1)
    return Stage(name, best / tickets * 1e6)


@contextmanager
def _journal(metrics: Metrics, level: Literal["info", "warning"]) -> Iterator[Journal]:
    """One that logs to a file, as the worker does."""
    before = structlog.get_config()
    with tempfile.TemporaryFile() as file:
        set_up_logging(level=level, form="json", fd=file.fileno(), clock=time.time)
        try:
            yield Journal(metrics, log_ticket_text=False)
        finally:
            structlog.configure(**before)
