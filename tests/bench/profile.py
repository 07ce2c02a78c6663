"""Where the whole worker's time goes, by stage: samples of its Python threads, taken by py-spy from outside.

Not part of a usual run: `pip install py-spy` first, and `--parts profile`.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.bench.pipeline import INPUT
from tests.bench.tickets import SURE
from tests.bench.watch import cost_of, watch
from tests.bench.whole import SETTLE_S, Bench

LATENCY_S = 0.02
ITEMS = 32
PER_SECOND = 250
WAITS = ("_do_wait", "_worker (concurrent", "wait (threading", "accept (", "poll (selectors", "select (selectors")
STAGES = (
    ("what addresses the router", ("Flagger.find",)),
    ("parse", ("Worker._ticket", "parse_ticket")),
    ("decide", ("decide (worker/core",)),
    ("log and metrics", ("Journal.",)),
    ("envelope, outputs", ("Publisher.", "Outputs.")),
    ("settle: produce, flush, commit", ("KafkaStream.settle", "StreamThread._settle_ready", "OffsetTracker.")),
    ("consume", ("KafkaStream.poll",)),
    ("cache", ("CacheBatch._", "RedisCache.", "TieredCache.", "redis/", "CacheBatch.")),
    ("engine call, HTTP", ("EnginePool.", "SGLangEngine.", "aiohttp/", "HttpExchange.", "Batcher._call")),
    ("batcher", ("Batcher.",)),
    ("ask: retries, deadline", ("Asker.", "Router._follow", "Router._score")),
    ("router, the rest", ("Router.",)),
    ("a task for each ticket", ("Worker._ask", "Worker._begin", "Worker.admit")),
)
"""The first whose name stands anywhere in a stack has the sample."""
REST = "event loop and the rest"


@dataclass(frozen=True, slots=True)
class Spent:
    """A stage's share of the samples, and its part of a ticket's CPU time."""

    stage: str
    share: float
    cpu_us: float


def run(bench: Bench, seconds: float) -> list[Spent]:
    """`INPUT` must hold enough tickets. Raises OSError where there is no py-spy."""
    spy = shutil.which("py-spy")
    if spy is None:
        raise FileNotFoundError("py-spy is not on the PATH: pip install py-spy")
    bench.stub.tell(latency_s=LATENCY_S, keywords=SURE)
    raw = bench.folder / "profile.raw"
    with bench.worker(INPUT, batch_items=ITEMS) as worker:
        while not worker.settled():
            time.sleep(0.1)
        time.sleep(SETTLE_S)
        plain = cost_of(watch(worker.process.pid, worker.settled, 10**9, at_most_s=seconds / 2))
        command = [spy, "record", "--pid", str(worker.process.pid), "--rate", str(PER_SECOND), "--format", "raw"]
        subprocess.run(
            [*command, "--duration", f"{seconds:.0f}", "--output", str(raw)], check=True, capture_output=True
        )
    bench.stub.tell(latency_s=0.0)
    counted = by_stage(raw.read_text().splitlines())
    total = max(1, sum(counted.values()))
    return [Spent(stage, count / total, plain.cpu_us * count / total) for stage, count in counted.most_common()]


def by_stage(lines: Iterable[str]) -> Counter[str]:
    """Samples of each stage; `lines` are stacks from outside to inside, and a count."""
    counted: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if not any(wait in stack.rpartition(";")[2] for wait in WAITS):
            counted[_stage_of(stack)] += int(count)
    return counted


def _stage_of(stack: str, stages: Sequence[tuple[str, Sequence[str]]] = STAGES) -> str:
    return next((stage for stage, names in stages if any(name in stack for name in names)), REST)
