"""What the benchmarks are to show, and whether they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.memory import Growth
from tests.bench.pipeline import Row
from tests.bench.saturation import Saturation
from tests.bench.slow import Slowdown
from tests.bench.stages import Stage
from tests.bench.whole import WholeResult

FLAT = 1.1
"""So many times the memory after a quarter of the tickets still counts as flat."""


@dataclass(frozen=True, slots=True)
class Target:
    """One of them, with what was found. Ratios are of CPU time a ticket."""

    name: str
    target: str
    found: str
    holds: bool


def targets(
    pipeline: Sequence[Row],
    whole: WholeResult | None,
    saturation: Saturation | None,
    slow: Slowdown | None,
    stages: Sequence[Stage],
    memory: Sequence[Growth],
) -> list[Target]:
    """Those that these parts tell of."""
    found = _without_scoring(pipeline)
    if whole is not None:
        found += _with_scoring(whole)
    if saturation is not None:
        share = saturation.share
        found.append(Target("share of a saturated engine", ">= 95 %", f"{share:.1%}", share >= 0.95))
    if slow is not None:
        during = slow.phases[1]
        most = 2 * slow.target_ms
        shown = f"{during.call_p99_ms:.0f} ms"
        found.append(Target("p99 of calls, engine 4x slower", f"< {most:.0f} ms", shown, during.call_p99_ms < most))
    found += [
        Target(stage.name, "< 10 us", f"{stage.us:.1f} us", stage.us < 10)
        for stage in stages
        if stage.name in ("a decision's metrics, without a log line", "span, 1 % sampled")
    ]
    for grown in memory:
        times = grown.last_mib / grown.early_mib
        name = f"memory after {grown.tickets:,} tickets {'scored' if grown.scored else 'by rule'}"
        found.append(Target(name, f"<= {FLAT}x of after a quarter", f"{times:.2f}x", times <= FLAT))
    return found


def _without_scoring(rows: Sequence[Row]) -> list[Target]:
    costs = {row.name: row.cost.cpu_us for row in rows if row.cost is not None}
    if "worker" not in costs:
        return []
    mine, plain, same = costs["worker"], costs[rows[0].name], costs[rows[1].name]
    found = [
        Target("without scoring, of the plain loop", "<= 1.5x", f"{mine / plain:.1f}x", mine <= 1.5 * plain),
        Target(
            "without scoring, of the loop with the same messages", "<= 1.5x", f"{mine / same:.1f}x", mine <= 1.5 * same
        ),
    ]
    for row in rows:
        if row.cost is not None and row.name.startswith(("Quix", "FastStream")):
            times = row.cost.cpu_us / mine
            found.append(Target(f"cheaper than {row.name}", "> 1x", f"{times:.2f}x", times > 1))
    return found


def _with_scoring(whole: WholeResult) -> list[Target]:
    most = max((case.items for case in whole.cases), default=0)
    cases = [case for case in whole.cases if case.sure]
    large = {case.latency_s: case for case in cases if case.items == most}
    found = []
    if large:
        cost = large[min(large)].cost.cpu_us
        for name, yardstick in (
            ("the plain loop", whole.plain),
            ("the loop with the same messages, in transactions", whole.plain_transactions),
        ):
            times = cost / yardstick.cpu_us
            for bound in (3.5, 7.0):
                found.append(
                    Target(f"whole worker, {most} items, of {name}", f"<= {bound:g}x", f"{times:.1f}x", times <= bound)
                )
    at_20_ms = {case.items: case for case in cases if case.latency_s == 0.02}
    for items, case in at_20_ms.items():
        if whole.cached is not None:
            times = whole.cached.per_second / case.cost.per_second
            name = f"all cached, of {items} items a request at 20 ms"
            found.append(Target(name, ">= 10x the rate", f"{times:.1f}x", times >= 10))
    return found
