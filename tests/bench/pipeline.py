"""Part (a): the pipeline without scoring, beside a hand-written loop and two frameworks on the same broker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.ground import Broker, Process, RuleFolder, Worker, Written, mock_broker
from tests.bench.tickets import CATEGORIES, ticket_bytes
from tests.bench.watch import Cost, StoodStill, cost_of, watch

HERE = Path(__file__).parent
INPUT = "bench-in"


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant's cost; None where it could not run, and why."""

    name: str
    cost: Cost | None
    trouble: str = ""


def plain_command(broker: Broker, topic: str, output: str, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tests.bench.plain",
        *_given(broker, topic, output),
        *more,
    ]


def run_plain(
    broker: Broker, folder: Path, topic: str, total: int, name: str, *more: str, at_most_s: float = 60.0
) -> Cost:
    """The yardstick: reads all of `topic`, under a group of its own."""
    command = plain_command(broker, topic, name, *more)
    return _measured(broker, folder, command, total, name, at_most_s)


def _given(broker: Broker, topic: str, output: str) -> list[str]:
    return ["--bootstrap", broker.bootstrap_servers, "--input", topic, "--output", output, "--group", output]


def _measured(broker: Broker, folder: Path, command: list[str], total: int, name: str, at_most_s: float) -> Cost:
    topics = [f"{name}.{category}" for category in CATEGORIES]
    for topic in topics:
        broker.create(topic)
    broker.create(f"{name}.decisions")
    written = Written(broker, topics)
    process = Process(command, folder / f"{name}.log")
    try:
        return cost_of(watch(process.pid, written, total, at_most_s=at_most_s))
    except StoodStill as error:
        raise StoodStill(f"{error}\n{process.tail()}") from None
    finally:
        process.kill()
        written.close()


@contextmanager
def worker_without_scoring(
    broker: Broker, folder: Path, engine_url: str, collector_url: str, name: str, **settings: object
) -> Iterator[Worker]:
    rules = RuleFolder(folder, name, engine_url, by_field=True)
    rules.create_topics(broker)
    with Worker(rules, broker, engine_url, INPUT, collector_url, settings) as worker:
        yield worker


def run(
    folder: Path, engine_url: str, collector_url: str, tickets: int, at_most_s: float, others: Path | None
) -> list[Row]:
    """The yardsticks first; ratios are to them. `others` is the interpreter that has the other frameworks."""
    rows: list[Row] = []
    with mock_broker() as broker:
        broker.fill(INPUT, ticket_bytes(tickets))
        rows.append(
            Row("plain confluent loop", run_plain(broker, folder, INPUT, tickets, "plain", at_most_s=at_most_s))
        )
        both = run_plain(broker, folder, INPUT, tickets, "plain2", "--same-job", at_most_s=at_most_s)
        rows.append(Row("plain loop, the worker's two messages", both))
        for name, settings in (
            ("worker", {}),
            ("worker, log level warning", {"log_level": "warning"}),
        ):
            short = f"worker{len(rows)}"
            with worker_without_scoring(
                broker, folder, engine_url, collector_url, short, delivery="at_least_once", **settings
            ) as worker:
                sights = watch(worker.process.pid, worker.settled, tickets, at_most_s=at_most_s)
            rows.append(Row(name, cost_of(sights)))
        for name, script, more in (
            ("Quix Streams", "quix_loop.py", []),
            ("FastStream, in batches", "faststream_loop.py", ["--batch"]),
            ("FastStream, per message", "faststream_loop.py", []),
        ):
            if others is None:
                rows.append(Row(name, None, "not installed: `make bench` does it"))
                continue
            short = f"other{len(rows)}"
            command = [str(others), str(HERE / "others" / script), *_given(broker, INPUT, short), *more]
            try:
                rows.append(Row(name, _measured(broker, folder, command, tickets, short, at_most_s)))
            except StoodStill as error:
                rows.append(Row(name, None, str(error)))
    return rows
