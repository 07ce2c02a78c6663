"""The demo: labelled tickets through a real worker, and what came of them."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import TypeAdapter

from worker.adapters.files import Labelled
from worker.adapters.topic_log import TopicReader, TopicWriter
from worker.core.artefact import Artefact
from worker.core.cards import Card, make_card
from worker.core.envelope import Envelope, Reason
from worker.core.korean import in_korean
from worker.core.normalise import canonical
from worker.core.rules import RuleSet
from worker.core.steering import flagger_for
from worker.errors import StreamRetriable
from worker.offline.demo_summary import DemoSummary, DeskSummary, ExampleDecision
from worker.ports import Output
from worker.runtime.loop import Worker
from worker.runtime.service import running

CALIBRATION_PART = 85
"""Percent of the samples that calibrate; the others are routed by the demo. They never mix."""
PATIENCE_S = 120.0
ESTIMATE_AFTER = 5
"""Tickets behind the first, which also pays for the prompt that all share."""

Progress = Callable[[int, int], None]
"""(done, total)."""


def with_estimate(
    progress: Progress, tickets: int, clock: Callable[[], float], tell: Callable[[float], None]
) -> Progress:
    """Also tells once, when a few are through, how many seconds so many new tickets take at that pace."""
    first: tuple[int, float] | None = None
    told = False

    def move(done: int, total: int) -> None:
        nonlocal first, told
        progress(done, total)
        if told or not done:
            return
        if first is None:
            first = (done, clock())
        elif done - first[0] >= ESTIMATE_AFTER:
            told = True
            tell((clock() - first[1]) / (done - first[0]) * tickets)

    return move


def in_calibration_part(ticket_id: str) -> bool:
    """By hash of the id, so in any order and on every machine the same."""
    digest = hashlib.sha256(f"ticket-router/demo-split/{ticket_id}".encode()).hexdigest()
    return int(digest, 16) % 100 < CALIBRATION_PART


@dataclass(frozen=True, slots=True)
class Pass:
    """One sending of all tickets."""

    envelopes: tuple[dict[str, Any], ...]
    """Decision envelopes (docs/messages.md), one a ticket."""
    dead_letters: int
    seconds: float

    @property
    def cached(self) -> int:
        return sum(bool(e["cached"]) for e in self.envelopes)

    @property
    def latencies_ms(self) -> tuple[float, ...]:
        """From a ticket's arrival in the worker to its decision."""
        return tuple(e["timings"]["total_ms"] for e in self.envelopes)


@dataclass(frozen=True, slots=True)
class DeskResult:
    """What became of one rule set's tickets."""

    rule_set: RuleSet
    artefact: Artefact | None
    tickets: tuple[Labelled, ...]
    passes: tuple[Pass, ...]

    @property
    def first(self) -> Pass:
        return self.passes[0]

    @property
    def routed(self) -> tuple[dict[str, Any], ...]:
        return tuple(e for e in self.first.envelopes if e["action"] == "route")

    @property
    def routed_per_category(self) -> Counter[str]:
        return Counter(e["category"] for e in self.routed)

    @property
    def escalated_per_reason(self) -> Counter[str]:
        return Counter(e["reasons"][0]["code"] for e in self.first.envelopes if e["action"] == "escalate")

    @property
    def wrong(self) -> int:
        """Routed by score to another category than the sample's label. Overrides promise nothing about labels."""
        label = {ticket.id: ticket.label for ticket in self.tickets}
        return sum(e["category"] != label[e["ticket_id"]] for e in self.scored_routes)

    @property
    def scored_routes(self) -> tuple[dict[str, Any], ...]:
        return tuple(e for e in self.routed if e["reasons"][0]["code"] == "certified")

    @property
    def automation_rate(self) -> float:
        return len(self.routed) / max(1, len(self.first.envelopes))

    @property
    def never_cached(self) -> int:
        """Tickets whose scores are not kept, however often they come: something in them may address the router."""
        if self.rule_set.rules.steering.recheck_share == 0:
            return 0
        flagger = flagger_for(self.rule_set)
        return sum(bool(flagger.find(canonical(ticket.text))) for ticket in self.tickets)


def percentile(values: Sequence[float], percent: int) -> float:
    """The usual interpolated percentile; the value itself where there is only one, NaN where there is none."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def run_desk(
    rule_set: RuleSet,
    artefact: Artefact | None,
    tickets: Sequence[Labelled],
    *,
    bootstrap_servers: str,
    open_worker: Callable[[], AbstractAsyncContextManager[Worker]],
    passes: int,
    progress: Progress,
) -> DeskResult:
    """Send the tickets `passes` times through one worker and collect every decision. Raises RouterError."""
    writer = TopicWriter(bootstrap_servers)
    topics = (rule_set.decisions_topic, rule_set.dead_letter_topic)
    done: list[Pass] = []
    async with open_worker() as worker, running(worker) as task:
        for number in range(passes):
            started = time.monotonic()
            await asyncio.to_thread(_send, writer, rule_set.input_topic, tickets)
            target = (number + 1) * len(tickets)
            await _until_settled(worker, task, target, lambda n: progress(n, passes * len(tickets)))
            seconds = time.monotonic() - started
            done.append(await asyncio.to_thread(_collect, bootstrap_servers, topics, done, seconds))
    return DeskResult(rule_set, artefact, tuple(tickets), tuple(done))


async def _until_settled(
    worker: Worker, task: asyncio.Task[None], target: int, progress: Callable[[int], None]
) -> None:
    """Raises what ended the worker, or StreamRetriable where nothing moves any more."""
    settled, moved_at = -1, time.monotonic()
    while settled < target and not task.done():
        now_settled = worker.status().settled
        if now_settled > settled:
            settled, moved_at = now_settled, time.monotonic()
            progress(settled)
        elif time.monotonic() - moved_at > PATIENCE_S:
            raise StreamRetriable(f"no ticket was finished for {PATIENCE_S:g} s")
        await asyncio.sleep(0.05)
    if task.done():
        await task
        raise StreamRetriable("the worker ended before its tickets did")


def _send(writer: TopicWriter, topic: str, tickets: Sequence[Labelled]) -> None:
    for ticket in tickets:
        value = orjson.dumps({"id": ticket.id, "text": ticket.text, "language": ticket.language})
        writer.write(Output(topic, ticket.id.encode(), value))
    writer.flush(30.0)


def _collect(bootstrap_servers: str, topics: tuple[str, str], earlier: Sequence[Pass], seconds: float) -> Pass:
    """What is in the topics now and was not there after the earlier passes."""
    decisions, dead_letters = topics
    seen = {e["decision_id"] for each in earlier for e in each.envelopes}
    reader = TopicReader(bootstrap_servers)
    try:
        envelopes: list[dict[str, Any]] = []
        dead = 0
        for record in reader.records(topics):
            if record.partition.topic == dead_letters:
                dead += 1
            elif record.partition.topic == decisions and record.value is not None:
                envelope = orjson.loads(record.value)
                if envelope["decision_id"] not in seen:
                    envelopes.append(envelope)
    finally:
        reader.close()
    return Pass(tuple(envelopes), dead - sum(each.dead_letters for each in earlier), seconds)


def examples(result: DeskResult, most: int) -> list[dict[str, Any]]:
    """Envelopes of the first pass, as different as there are: every reason in turn, each time another category."""
    by_reason: dict[str, dict[str, dict[str, Any]]] = {}
    for envelope in result.first.envelopes:
        by_reason.setdefault(envelope["reasons"][0]["code"], {}).setdefault(str(envelope["category"]), envelope)
    waiting = [list(group.values()) for group in by_reason.values()]
    picked: list[dict[str, Any]] = []
    while any(waiting) and len(picked) < most:
        picked += [group.pop(0) for group in waiting if group][: most - len(picked)]
    return picked


def summarise(results: Sequence[DeskResult], *, created_at: str, hardware: str, seconds: float) -> DemoSummary:
    """What the report shows; five examples of each rule set."""
    scored = [e for result in results for e in result.first.envelopes if e["engine"]]
    return DemoSummary(
        created_at=created_at,
        engine=scored[0]["engine"] if scored else "",
        model=scored[0]["model"] if scored else "",
        hardware=hardware,
        seconds=seconds,
        desks=tuple(_desk_summary(result) for result in results),
    )


def sentence_of(record: dict[str, Any], rule_set: RuleSet) -> str:
    """Why it was decided so, in the language of the desk: Korean, else English."""
    given = record["reasons"][0]
    why = Reason(given["code"], given["sentence"], given["values"])
    return in_korean(why) if rule_set.categories.language == "ko" else why.sentence


def card_of(record: dict[str, Any], rule_set: RuleSet) -> Card | None:
    """As the worker made it, but for duplicates, which only the worker knows."""
    if record["action"] == "route":
        return None
    return make_card(TypeAdapter(Envelope).validate_python(record), rule_set)


def _desk_summary(result: DeskResult) -> DeskSummary:
    labelled = {ticket.id: ticket for ticket in result.tickets}
    artefact = result.artefact
    return DeskSummary(
        rule_set=result.rule_set.id,
        language=result.rule_set.categories.language,
        alpha=result.rule_set.rules.alpha,
        delta=result.rule_set.rules.delta,
        labelled=int(artefact.data.get("usable", 0)) if artefact else 0,
        tickets=len(result.tickets),
        routed=result.routed_per_category,
        escalated=result.escalated_per_reason,
        dead_lettered=result.first.dead_letters,
        scored_routes=len(result.scored_routes),
        wrong=result.wrong,
        cache_hits=sum(each.cached for each in result.passes),
        asked=sum(len(each.envelopes) for each in result.passes),
        tickets_per_s=len(result.first.envelopes) / result.first.seconds,
        p50_ms=percentile(result.first.latencies_ms, 50),
        p95_ms=percentile(result.first.latencies_ms, 95),
        certificates=artefact.certificates if artefact else (),
        examples=tuple(
            ExampleDecision(
                text=labelled[e["ticket_id"]].text,
                language=labelled[e["ticket_id"]].language,
                action=e["action"],
                category=e["category"],
                probability=e["probability"],
                reason=e["reasons"][0]["code"],
                sentence=sentence_of(e, result.rule_set),
                truth=labelled[e["ticket_id"]].label,
                card=card_of(e, result.rule_set),
            )
            for e in examples(result, 5)
        ),
    )
