"""What the benchmarks say: tables for people, JSON for programs, and a plot."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from tests.bench.cache import LookUp
from tests.bench.engine import Asked
from tests.bench.memory import Growth
from tests.bench.pipeline import Row
from tests.bench.plot import draw
from tests.bench.profile import Spent
from tests.bench.saturation import Saturation
from tests.bench.sizing import Sized
from tests.bench.slow import Slowdown
from tests.bench.stages import Stage
from tests.bench.targets import Target, targets
from tests.bench.watch import Cost
from tests.bench.whole import Case, WholeResult

LIBRARIES = ("confluent-kafka", "redis", "httpx", "aiohttp", "orjson", "pydantic")


@dataclass
class Results:
    """Whatever parts were run."""

    short: bool
    pipeline: Sequence[Row] = ()
    whole: WholeResult | None = None
    cache: Sequence[LookUp] = ()
    engine: Sequence[Asked] = ()
    engine_name: str = ""
    saturation: Saturation | None = None
    slow: Slowdown | None = None
    stages: Sequence[Stage] = ()
    sizing: Sequence[Sized] = ()
    profile: Sequence[Spent] = ()
    memory: Sequence[Growth] = ()
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def conditions(self) -> dict[str, str]:
        """What the numbers hold for."""
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        return {
            "date": self.began.isoformat(timespec="minutes"),
            "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
            "load": load,
            "python": platform.python_version(),
            "libraries": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
            "event loop": _event_loop(),
        }

    def tables(self) -> str:
        """All parts that were run, as text."""
        parts = [
            ("", [f"{name}: {value}" for name, value in self.conditions().items()]),
            ("(a) pipeline without scoring, mock broker", _pipeline(self.pipeline)),
            ("(b) whole worker, stub engine, Apache Kafka; exactly once unless it says otherwise", _whole(self.whole)),
            ("(c) every ticket cached, beside 20 ms without a cache", _cached(self.whole)),
            ("(d) looking scores up in Redis", _cache(self.cache)),
            (f"(e) scoring and writing, {self.engine_name}", _engine(self.engine)),
            ("a saturated engine", _saturation(self.saturation)),
            ("an engine that turns four times slower", _slow(self.slow)),
            ("what a stage costs by itself", _stages(self.stages)),
            ("by length and categories, 32 items, 20 ms", _sizing(self.sizing)),
            ("where the whole worker's time goes", _profile(self.profile)),
            ("memory", _memory(self.memory)),
            ("targets", _targets(self.targets())),
        ]
        return "\n".join(f"\n{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in parts if lines)

    def targets(self) -> list[Target]:
        """Those that the parts that were run can tell of."""
        return targets(self.pipeline, self.whole, self.saturation, self.slow, self.stages, self.memory)

    def to_json(self) -> bytes:
        body: dict[str, Any] = {"conditions": self.conditions(), "short": self.short}
        body["pipeline"] = [asdict(row) for row in self.pipeline]
        body["whole"] = asdict(self.whole) if self.whole else None
        body["cache"] = [asdict(row) for row in self.cache]
        body["engine"] = {"name": self.engine_name, "rows": [asdict(row) for row in self.engine]}
        body["saturation"] = asdict(self.saturation) if self.saturation else None
        body["slow"] = asdict(self.slow) if self.slow else None
        body["stages"] = [asdict(row) for row in self.stages]
        body["sizing"] = [asdict(row) for row in self.sizing]
        body["profile"] = [asdict(row) for row in self.profile]
        body["targets"] = [asdict(row) for row in self.targets()]
        body["memory"] = [asdict(row) for row in self.memory]
        return orjson.dumps(body, option=orjson.OPT_INDENT_2)

    def plot(self, path: Path) -> None:
        """One picture: a panel for each part that has something to show. Needs matplotlib (extra `offline`)."""
        draw(self, path, _costs(self))


def _costs(results: Results) -> list[tuple[str, float]]:
    costs = [(f"(a) {row.name}", row.cost.cpu_us) for row in results.pipeline if row.cost]
    if (whole := results.whole) is not None:
        costs += [(f"(b) {name}", cost.cpu_us) for name, cost in _yardsticks(whole).items()]
        costs += [(f"(b) {_named(case)}", case.cost.cpu_us) for case in whole.cases]
        if whole.cached is not None:
            costs.append(("(c) worker, all cached", whole.cached.cpu_us))
    return costs


def _yardsticks(whole: WholeResult) -> Mapping[str, Cost]:
    return {
        "plain confluent loop": whole.plain,
        "plain loop, the worker's two messages": whole.plain_same_job,
        "plain loop, the same in transactions": whole.plain_transactions,
    }


def _line(name: str, cost: Cost, plain: Cost, same: Cost | None) -> str:
    also = f"{cost.cpu_us / same.cpu_us:6.2f}x" if same is not None else " " * 7
    return f"{name:42} {cost.cpu_us:8.1f} us {cost.cpu_us / plain.cpu_us:7.2f}x {also} {cost.per_second:9,.0f}/s"


HEAD = f"{'':42} {'CPU a ticket':>11} {'of plain':>8} {'of same':>7} {'wall clock':>11}"


def _pipeline(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    plain, same = rows[0].cost, rows[1].cost
    assert plain is not None
    lines = [HEAD]
    for row in rows:
        lines.append(f"{row.name:42} {row.trouble}" if row.cost is None else _line(row.name, row.cost, plain, same))
    return lines


def _whole(whole: WholeResult | None) -> list[str]:
    if whole is None:
        return []
    plain, same = whole.plain, whole.plain_same_job
    lines = [HEAD, *(_line(name, cost, plain, same) for name, cost in _yardsticks(whole).items())]
    for case in whole.cases:
        lines.append(
            f"{_line(_named(case), case.cost, plain, same)}  {case.items_per_request:4.1f} a request, "
            f"{case.to_people:.0%} to people, settled in {case.settle_ms:.0f} ms"
        )
    return lines


def _named(case: Case) -> str:
    name = f"worker, {case.items} items, {case.latency_s * 1e3:.0f} ms"
    name += "" if case.delivery == "exactly_once" else ", at least once"
    return name if case.sure else f"{name}, all to people"


def _cached(whole: WholeResult | None) -> list[str]:
    if whole is None or whole.cached is None:
        return []
    cached = whole.cached
    lines = [f"{'all cached':42} {cached.cpu_us:8.1f} us {cached.per_second:9,.0f}/s"]
    for case in whole.cases:
        if case.latency_s == 0.02 and case.sure:
            times = cached.per_second / case.cost.per_second
            cheaper = case.cost.cpu_us / cached.cpu_us
            lines.append(
                f"{f'of {case.items} items a request, 20 ms':42} {times:5.1f}x the rate, {cheaper:4.1f}x less CPU"
            )
    return lines


def _cache(rows: Sequence[LookUp]) -> list[str]:
    return [f"{row.name:42} {row.cpu_us:8.1f} us a ticket {rows[0].cpu_us / row.cpu_us:6.1f}x less" for row in rows]


def _engine(rows: Sequence[Asked]) -> list[str]:
    scoring = {row.concurrency: row for row in rows if row.way == "scoring"}
    lines = [f"{'':18} {'at once':>7} {'tickets/s':>10} {'p50':>10} {'p95':>10} {'scoring is':>12}"] if rows else []
    for row in rows:
        times = scoring[row.concurrency].per_second / row.per_second
        ratio = "" if row.way == "scoring" else f"{times:10.1f}x"
        failed = f"  {row.failed} failed" if row.failed else ""
        lines.append(
            f"{row.way:18} {row.concurrency:7} {row.per_second:10.1f} {row.p50_ms:7.0f} ms {row.p95_ms:7.0f} ms "
            f"{ratio:>12}{failed}"
        )
    return lines


def _saturation(found: Saturation | None) -> list[str]:
    if found is None:
        return []
    return [
        f"possible {found.possible:.0f} tickets/s, bare load generator {found.generator:.0f}, "
        f"worker {found.worker:.0f}: {found.share:.1%} of the generator's",
        f"engine busy {found.generator_busy:.1%} of the time by the generator, {found.worker_busy:.1%} by the worker",
    ]


def _slow(found: Slowdown | None) -> list[str]:
    if found is None:
        return []
    lines = [
        f"latency target {found.target_ms:.0f} ms; slow for {found.seconds:.0f} s, when it could do "
        f"{found.possible:.0f} tickets/s and did {found.per_second:.0f}",
        f"{'':18} {'calls':>6} {'items each':>10} {'call p50':>10} {'p99':>10} {'ticket p50':>11} {'p99':>10}",
    ]
    for phase in found.phases:
        lines.append(
            f"{phase.name:18} {phase.calls:6} {phase.items_per_call:10.1f} {phase.call_p50_ms:7.0f} ms "
            f"{phase.call_p99_ms:7.0f} ms {phase.ticket_p50_ms:8.0f} ms {phase.ticket_p99_ms:7.0f} ms"
        )
    return lines


def _stages(rows: Sequence[Stage]) -> list[str]:
    return [f"{row.name:42} {row.us:8.2f} us" for row in rows]


def _sizing(rows: Sequence[Sized]) -> list[str]:
    lines = (
        [f"{'categories':>10} {'characters':>10} {'CPU a ticket':>14} {'of first':>9} {'on a core':>11}"]
        if rows
        else []
    )
    for row in rows:
        times = row.cost.cpu_us / rows[0].cost.cpu_us
        lines.append(
            f"{row.categories:10} {row.characters:10,} {row.cost.cpu_us:11.1f} us {times:8.2f}x "
            f"{row.cost.per_core_second:9,.0f}/s"
        )
    return lines


def _profile(rows: Sequence[Spent]) -> list[str]:
    return [f"{row.stage:42} {row.share:6.1%} {row.cpu_us:8.1f} us" for row in rows]


def _targets(rows: Sequence[Target]) -> list[str]:
    return [f"{'holds ' if row.holds else 'MISSED'} {row.name}: {row.found} (target {row.target})" for row in rows]


def _memory(rows: Sequence[Growth]) -> list[str]:
    return [
        f"{row.tickets:,} tickets {'scored' if row.scored else 'by rule'}: {row.early_mib:.0f} MiB after a quarter, "
        f"at most {row.most_mib:.0f}, {row.last_mib:.0f} at the end"
        for row in rows
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _event_loop() -> str:
    try:
        return f"uvloop {version('uvloop')}"
    except ModuleNotFoundError:
        return "asyncio"
