"""One run: tickets flow through three workers, the scheduled faults strike, and at the end the topics are judged."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Producer

from tests.chaos.deployment import IN_FLIGHT, PARTITIONS, Deployment, Unexpected, wait_until
from tests.chaos.injection import Injection, inject
from tests.chaos.ledger import Verdict, judge, read
from tests.chaos.offsets import CommittedOffsets
from tests.chaos.schedule import WORKERS, Fault, together
from tests.chaos.workload import Sent, tickets
from tests.integration.desk import COMMAND

AHEAD = WORKERS * IN_FLIGHT + 400
"""At most so many tickets are sent and not settled: the workers are full, and others wait."""

KEPT_BACK = 150
"""So many tickets at least are kept for each fault, however fast the workers are."""

WEATHER_EVERY_S = 0.5
MEAN_LATENCY_S, MOST_LATENCY_S = 0.3, 1.5


@dataclass(slots=True)
class Outcome:
    verdict: Verdict | None = None
    struck: int = 0
    problems: list[str] = field(default_factory=list)
    """What did not go as it should, besides what the verdict says."""


class _Silent:
    def log(self, *_: object) -> None: ...


_SILENT = _Silent()


class Run:
    """One deployment from its start to its end. `outcome` and `outstanding` can be asked from another thread."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        count: int,
        faults: Sequence[Fault],
        seed: int,
        until: float,
        say: Callable[[str], None],
        group_protocol: str,
    ) -> None:
        """`until` is a time of the monotonic clock."""
        self.outcome = Outcome()
        self.faults = faults
        self._folder = folder
        self._nodes = nodes
        self._group_protocol = group_protocol
        self._sent: tuple[Sent, ...] = tuple(tickets(seed, count))
        self._seed = seed
        self._until = until
        self._say = say
        self._deployment: Deployment | None = None
        self._over = threading.Event()
        self._produced = 0
        self._offsets: CommittedOffsets | None = None
        self._may_send = 0
        self._stage = "starting"

    @property
    def _settled(self) -> int:
        return self._offsets.settled if self._offsets is not None else 0

    def outstanding(self) -> str:
        """Where it stands, for whoever has run out of time."""
        rest = [str(fault) for fault in self.faults[self.outcome.struck :]]
        return (
            f"{self._stage}; {self._settled:,} of {len(self._sent):,} tickets settled, {len(rest)} of "
            f"{len(self.faults)} faults outstanding{': ' + ', '.join(rest) if rest else ''}"
        )

    def play(self) -> Outcome:
        """Raises Unexpected, TimeoutError and what the servers raise where the run cannot go on."""
        deployment = self._deployment = Deployment(self._folder, self._nodes, self._group_protocol)
        try:
            deployment.start()
            for worker in deployment.workers:
                worker.start()
            with self._background(deployment):
                self._stage = "waiting for the workers"
                self._wait(lambda: sum(w.assigned() for w in deployment.workers) == PARTITIONS, "partitions", 120)
                self._strike_all(deployment)
                self._stage = "working off the rest"
                self._may_send = len(self._sent)
                self._wait(lambda: self._settled >= len(self._sent), "the rest of the tickets is settled", 120)
            self._stage = "stopping the workers"
            for worker in deployment.workers:
                wait_until(lambda w=worker: bool(w.status()), f"{worker.name} answers", 60)  # type: ignore[misc]
                worker.terminate()
            self._stage = "judging"
            self._judge(deployment)
        finally:
            deployment.stop()
        return self.outcome

    # -- faults ------------------------------------------------------------------------------------------------------

    def _strike_all(self, deployment: Deployment) -> None:
        groups = together(self.faults)
        kept_back = min(KEPT_BACK, len(self._sent) * 4 // 5 // len(groups))
        with ThreadPoolExecutor() as pool:
            for number, group in enumerate(groups, 1):
                self._stage = f"before {' and '.join(map(str, group))}"
                injections = [inject(deployment, fault) for fault in group]
                for each in injections:
                    next(each)
                due = int(group[0].at * len(self._sent))
                rest = len(self._sent) - kept_back * (len(groups) - number)
                self._may_send = min(rest, max(due, self._settled) + AHEAD)
                self._wait(lambda d=due: self._at_work(d, kept_back), f"{due:,} tickets are settled, and more", 120)  # type: ignore[misc]
                self._stage = " and ".join(f"{fault} for {fault.hold_s:g} s" for fault in group)
                ahead = self._produced - self._settled
                self._say(f"{self._settled:6,} settled, {ahead:5,} under way: {self._stage}")
                if ahead <= 0:
                    self._problem(f"{self._stage}: there was no work that it could have hit")
                ends = [pool.submit(_carry_out, each) for each in injections]
                for fault, end in zip(group, ends, strict=True):
                    try:
                        end.result()
                    except Unexpected as problem:
                        self._problem(f"{fault}: {problem}")
                    else:
                        self.outcome.struck += 1

    def _at_work(self, due: int, kept_back: int) -> bool:
        """So many are settled, and there are others that a fault can hit."""
        return self._settled >= due and self._produced - self._settled >= kept_back // 2

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(text)
        self._say(f"PROBLEM {text}")

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """As `wait_until`, and looks after the workers meanwhile: none may end by itself."""
        deployment = self._deployment
        assert deployment is not None
        give_up_at = min(self._until, time.monotonic() + timeout_s)
        while not condition():
            for worker in deployment.workers:
                if worker.ended is not None:
                    self._problem(f"{worker.name} ended by itself, with code {worker.ended}:\n{worker.tail()}")
                    worker.start()
            if time.monotonic() >= give_up_at:
                raise TimeoutError(f"waited {timeout_s:g} s in vain for {what}")
            time.sleep(0.05)

    # -- meanwhile ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _background(self, deployment: Deployment) -> Iterator[None]:
        """Tickets are sent, offsets watched, and the engine's latency changes."""
        jobs = [self._feed, self._weather]
        offsets = CommittedOffsets(deployment.bootstrap_servers, deployment.group, deployment.topics.input, PARTITIONS)
        self._offsets = offsets
        with offsets, ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(job, deployment) for job in jobs]
            try:
                yield
            finally:
                self._over.set()
            for job in running:
                job.result()

    def _feed(self, deployment: Deployment) -> None:
        producer = Producer(
            {
                "bootstrap.servers": deployment.bootstrap_servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
                "logger": _SILENT,
            }
        )
        topic, sent = deployment.topics.input, 0

        def delivered(error: object, _message: object) -> None:
            if error is not None:
                self._problem(f"a ticket could not be sent: {error}")
            self._produced += 1

        while not self._over.is_set() and sent < len(self._sent):
            if sent >= self._may_send or sent - self._settled >= AHEAD:
                producer.poll(0.05)
                continue
            producer.produce(topic, self._sent[sent].value, self._sent[sent].key, on_delivery=delivered)
            producer.poll(0)
            sent += 1
        if producer.flush(60):
            self._problem("tickets could not be sent")

    def _weather(self, deployment: Deployment) -> None:
        chance = random.Random(f"{self._seed}/weather")
        while not self._over.wait(WEATHER_EVERY_S):
            with suppress(OSError):  # killed
                deployment.engine.tell(latency_s=min(MOST_LATENCY_S, chance.expovariate(1 / MEAN_LATENCY_S)))

    # -- the end -----------------------------------------------------------------------------------------------------

    def _judge(self, deployment: Deployment) -> None:
        desk, topics = deployment.desk, deployment.topics
        assert desk is not None
        left_s = max(1.0, self._until - time.monotonic())
        came_in = read(deployment.bootstrap_servers, (topics.input,), self._until)
        came_out = read(deployment.bootstrap_servers, topics.outputs, self._until)
        samples = self._offsets.samples if self._offsets is not None else []
        verdict = self.outcome.verdict = judge(topics, self._sent, came_in, came_out, samples)
        ends = ", ".join(f"{count:,} {name.replace('_', '-')}" for name, count in sorted(verdict.ends.items()))
        self._say(f"{verdict.tickets:,} tickets: {ends}; {len(samples)} looks at the committed offsets")
        for name, where in verdict.problems.items():
            self._problem(f"{len(where)} {name}, such as {', '.join(where[:5])}")
        audit = subprocess.run(
            [str(COMMAND), "audit", "--rules", str(desk.folder)],
            env={**os.environ, **desk.environment},
            cwd=desk.folder,
            capture_output=True,
            text=True,
            timeout=left_s,
            check=False,
        )
        last = (audit.stdout.strip().splitlines() or [""])[-1]
        self._say(f"the audit says: {last}")
        if audit.returncode != 0 or last != "missing 0, duplicates 0, order violations 0":
            self._problem(f"the audit exits with {audit.returncode}:\n{audit.stdout}{audit.stderr}")


def _carry_out(injection: Injection) -> None:
    for _ in injection:
        pass
