"""Parts (b) and (c): the whole worker on Apache Kafka, exactly once, with a stub engine; then all from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.ground import Broker, RuleFolder, Worker
from tests.bench.pipeline import INPUT, run_plain
from tests.bench.tickets import CATEGORIES, SURE, ticket_bytes
from tests.bench.watch import Cost, cost_of, watch
from tests.integration.desk import StubProcess, http
from worker.settings import Settings

LATENCIES_S = (0.0, 0.02, 0.2)
ITEMS = (1, 8, 32)
CONCURRENCY = 16
REPEATS = 200
"""Different texts where every ticket is a repeat."""
SETTLE_S = 2.0
"""After the first settled ticket this passes before anything counts, and until so many are settled as may be in flight:
tickets settle in order, and of the first ones every other is asked about again behind all that were taken meanwhile."""
IN_FLIGHT: int = Settings.model_fields["max_in_flight"].default


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the whole worker."""

    latency_s: float
    items: int
    delivery: str
    cost: Cost
    items_per_request: float
    settle_ms: float
    sure: bool
    """Whether the engine was, of half of the tickets; else all go to people."""
    to_people: float
    """Share of the tickets."""


@dataclass(frozen=True, slots=True)
class WholeResult:
    plain: Cost
    plain_same_job: Cost
    plain_transactions: Cost
    cases: Sequence[Case]
    cached: Cost | None


class Bench:
    """Everything that runs of parts (b) and (c) share."""

    def __init__(self, folder: Path, broker: Broker, stub: StubProcess, redis_url: str, collector_url: str) -> None:
        self.folder = folder
        self.broker = broker
        self.stub = stub
        self.redis_url = redis_url
        self.collector_url = collector_url
        self._runs = 0

    @contextmanager
    def worker(
        self, input_topic: str, categories: Sequence[str] = CATEGORIES, /, **settings: object
    ) -> Iterator[Worker]:
        """With a rule set, topics and cache keys of its own."""
        self._runs += 1
        rules = RuleFolder(self.folder, f"whole{self._runs}", self.stub.url, categories=categories)
        rules.create_topics(self.broker)
        everything = {"redis_url": self.redis_url, "batch_concurrency": CONCURRENCY, **settings}
        worker = Worker(rules, self.broker, self.stub.url, input_topic, self.collector_url, everything)
        try:
            worker.wait_listening()
            yield worker
        finally:
            worker.kill()

    def case(
        self,
        input_topic: str,
        total: int,
        latency_s: float,
        items: int,
        at_most_s: float,
        /,
        *,
        sure: bool = True,
        **settings: object,
    ) -> Case:
        self.stub.tell(latency_s=latency_s, keywords=SURE if sure else {})
        before = self.stub.tell()["counters"]
        with self.worker(input_topic, batch_items=items, **settings) as worker:
            sights = watch(
                worker.process.pid,
                worker.settled,
                total,
                at_most_s=at_most_s,
                settle_s=SETTLE_S,
                settle_units=IN_FLIGHT,
            )
            metrics, to_people = metrics_of(worker), share_to_people(worker)
        after = self.stub.tell()["counters"]
        requests = max(1, after["requests"] - before["requests"])
        settles = max(1.0, metrics["ticket_router_settle_latency_seconds_count"])
        return Case(
            latency_s,
            items,
            str(settings.get("delivery", "exactly_once")),
            cost_of(sights),
            (after["items"] - before["items"]) / requests,
            metrics["ticket_router_settle_latency_seconds_sum"] / settles * 1e3,
            sure,
            to_people,
        )


def metrics_of(worker: Worker) -> Mapping[str, float]:
    """Values without labels."""
    pairs = (line.split(" ") for line in _lines(worker) if "{" not in line)
    return {name: float(value) for name, value in pairs}


def share_to_people(worker: Worker) -> float:
    """Of the tickets decided so far."""
    name = "ticket_router_decisions_total{"
    counts = [(line, float(line.rpartition(" ")[2])) for line in _lines(worker) if line.startswith(name)]
    everyone = sum(count for _, count in counts)
    return sum(count for line, count in counts if 'action="escalate"' in line) / max(1.0, everyone)


def _lines(worker: Worker) -> list[str]:
    text = http(f"http://127.0.0.1:{worker.port}/metrics")[1].decode()
    return [line for line in text.splitlines() if line and line[0] != "#"]


def run(
    bench: Bench, tickets: int, at_most_s: float, latencies_s: Sequence[float], items: Sequence[int]
) -> WholeResult:
    """The yardsticks first, on the same broker, whose INPUT holds so many tickets; then the worker; then repeats."""
    broker, folder = bench.broker, bench.folder
    plain = run_plain(broker, folder, INPUT, tickets, "plain", at_most_s=at_most_s)
    same = run_plain(broker, folder, INPUT, tickets, "plain2", "--same-job", at_most_s=at_most_s)
    exact = run_plain(broker, folder, INPUT, tickets, "plain3", "--same-job", "--transactions", at_most_s=at_most_s)
    cases = [bench.case(INPUT, tickets, latency_s, count, at_most_s) for latency_s in latencies_s for count in items]
    cases.append(bench.case(INPUT, tickets, 0.02, max(items), at_most_s, sure=False))
    broker.fill("bench-repeats", ticket_bytes(tickets, distinct=REPEATS))
    cached = bench.case("bench-repeats", tickets, 0.02, 32, at_most_s).cost
    return WholeResult(plain, same, exact, cases, cached)
