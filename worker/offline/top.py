"""Top: what several workers did between two looks at each, as numbers for one screen."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from worker.offline.metrics_page import Buckets, Labels, Page
from worker.telemetry import (
    CACHE_LOOKUPS,
    CALIBRATION_IN_FORCE,
    CERTIFIED,
    DEAD_LETTERS,
    DECISIONS,
    ENGINE_ENDPOINT_UP,
    ENGINE_LATENCY,
    ENGINE_REQUESTS,
    ENGINE_UP,
    IN_FLIGHT,
    INFO,
    LAG,
    MODE,
    OLDEST_AGE,
    PARTITIONS,
    SETTLED,
    TICKET_LATENCY,
    Metric,
)

TOP_REASONS: Final = 5
TOP_CATEGORIES: Final = 12


@dataclass(frozen=True, slots=True)
class Look:
    """What one worker answered, or why there is nothing to show of it."""

    url: str
    readiness: str
    page: Page | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """Something that is counted: how many a second lately (None: not known yet), and since the workers started."""

    what: tuple[str, ...]
    per_s: float | None
    total: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, estimated within a histogram's buckets; infinite past the last bound, None where nothing was
    measured."""

    p50: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker now. None is not known."""

    url: str
    readiness: str
    reachable: bool
    settled_per_s: float | None = None
    partitions: float | None = None
    lag: float | None = None
    in_flight: float | None = None
    oldest_s: float | None = None
    breakers: tuple[tuple[str, bool], ...] = ()
    """Endpoints of the engine, and whether they take requests."""
    runs: str = ""
    """Rule set and version."""
    calibration: str = ""
    """Its digest, or why none is in force."""
    is_calibrated: bool = False
    certified: tuple[int, int] = (0, 0)
    """Categories that can be routed to, of all."""
    modes: tuple[tuple[str, int], ...] = ()
    """How many categories are in each."""


@dataclass(frozen=True, slots=True)
class Screen:
    """All workers together, and each."""

    workers: tuple[WorkerLine, ...]
    settled: Flow
    dead_letters: Flow
    actions: tuple[Flow, ...]
    categories: tuple[Flow, ...]
    """By action and category, the most frequent."""
    escalations: tuple[Flow, ...]
    """By reason, the most frequent."""
    cache_hits: float | None
    """Share of look-ups lately that found something; None where none was made."""
    cache_hits_since_start: float | None
    """The same of all look-ups."""
    engine: Latency
    engine_requests: tuple[Flow, ...]
    """By outcome."""
    tickets: Latency


def screen(before: Sequence[Look], now: Sequence[Look]) -> Screen:
    """The same workers twice, in the same order; `before` is empty at the first look."""
    earlier: Sequence[Look | None] = before or [None] * len(now)
    both = list(zip(earlier, now, strict=True))
    pairs = [(old.page if old is not None else None, new.page) for old, new in both if new.page is not None]
    decisions = _flows(pairs, DECISIONS)
    lookups = _flows(pairs, CACHE_LOOKUPS)
    return Screen(
        workers=tuple(_line(old, new) for old, new in both),
        settled=_sum(_flows(pairs, SETTLED), ()),
        dead_letters=_sum(_flows(pairs, DEAD_LETTERS), ()),
        actions=_by(decisions, lambda labels: labels[:1]),
        categories=_by(decisions, lambda labels: (labels[0], labels[1] or "-"))[:TOP_CATEGORIES],
        escalations=_by([f for f in decisions if f.what[0] != "route"], lambda labels: labels[2:])[:TOP_REASONS],
        cache_hits=_hits({flow.what[0]: flow.per_s or 0.0 for flow in lookups}),
        cache_hits_since_start=_hits({flow.what[0]: flow.total for flow in lookups}),
        engine=_latency(pairs, ENGINE_LATENCY),
        engine_requests=_by(_flows(pairs, ENGINE_REQUESTS), lambda labels: labels),
        tickets=_latency(pairs, TICKET_LATENCY),
    )


def _hits(lookups: Mapping[str, float]) -> float | None:
    """Share of look-ups that found something."""
    hits = lookups.get("memory_hits", 0.0) + lookups.get("redis_hits", 0.0)
    looked_up = hits + lookups.get("misses", 0.0)
    return hits / looked_up if looked_up else None


Pairs = Sequence[tuple[Page | None, Page]]


def _flows(pairs: Pairs, metric: Metric) -> list[Flow]:
    """Summed over the workers; a rate is known where one of them was seen twice."""
    rates: defaultdict[Labels, float] = defaultdict(float)
    totals: defaultdict[Labels, float] = defaultdict(float)
    any_rate = False
    for before, now in pairs:
        for labels, value in now.values.get(metric, {}).items():
            totals[labels] += value
            if before is not None and (seconds := now.at - before.at) > 0:
                any_rate = True
                rates[labels] += _grown(before.value(metric, *labels) or 0.0, value) / seconds
    return [Flow(labels, rates[labels] if any_rate else None, total) for labels, total in totals.items()]


def _grown(before: float, now: float) -> float:
    """A counter that is lower than before began anew with its worker."""
    return now - before if now >= before else now


def _by(flows: Iterable[Flow], key: Callable[[tuple[str, ...]], tuple[str, ...]]) -> tuple[Flow, ...]:
    """Summed by the key, the most frequent first."""
    groups: dict[tuple[str, ...], list[Flow]] = {}
    for flow in flows:
        groups.setdefault(key(flow.what), []).append(flow)
    sums = [_sum(group, what) for what, group in groups.items()]
    return tuple(sorted(sums, key=lambda flow: (-(flow.per_s or 0.0), -flow.total, flow.what)))


def _sum(flows: Sequence[Flow], what: tuple[str, ...]) -> Flow:
    known = [flow.per_s for flow in flows if flow.per_s is not None]
    return Flow(what, sum(known) if known else None, sum(flow.total for flow in flows))


def _latency(pairs: Pairs, metric: Metric) -> Latency:
    """Of what came between the looks; where nothing did, or nothing is known of it, since the workers started."""
    whole = [_grown_buckets(None, now.buckets.get(metric, ())) for _, now in pairs]
    lately = [
        _grown_buckets(before.buckets.get(metric, ()), now.buckets.get(metric, ()))
        for before, now in pairs
        if before is not None
    ]
    for each in (lately, whole):
        together = _together(each)
        if together and together[-1][1] > 0:
            return Latency(quantile(together, 0.5), quantile(together, 0.95))
    return Latency(None, None)


def _grown_buckets(before: Buckets | None, now: Buckets) -> Buckets:
    earlier = dict(before or ())
    if any(earlier.get(bound, 0.0) > count for bound, count in now):
        return now  # it began anew
    return tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in now)


def _together(each: Sequence[Buckets]) -> Buckets:
    """Workers of one version have the same bounds; of another's, nothing can be added."""
    shared = [buckets for buckets in each if buckets and [b for b, _ in buckets] == [b for b, _ in each[0]]]
    return tuple((rows[0][0], sum(count for _, count in rows)) for rows in zip(*shared, strict=True))


def quantile(buckets: Buckets, share: float) -> float | None:
    """As Prometheus' histogram_quantile: evenly spread within a bucket. Infinite where it lies past the last bound."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    rank = share * total
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return math.inf
            return bound if count <= below else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return math.inf


def _line(before: Look | None, now: Look) -> WorkerLine:
    page = now.page
    if page is None:
        return WorkerLine(now.url, now.readiness, reachable=False)
    earlier = before.page if before is not None else None
    settled = _sum(_flows([(earlier, page)], SETTLED), ())
    engine_up = page.value(ENGINE_UP)
    endpoints = page.values.get(ENGINE_ENDPOINT_UP) or ({} if engine_up is None else {("engine",): engine_up})
    certified = page.values.get(CERTIFIED, {})
    in_force = page.values.get(CALIBRATION_IN_FORCE, {})
    info = next(iter(page.values.get(INFO, {})), None)
    is_calibrated = any(value >= 1 for value in in_force.values())
    return WorkerLine(
        now.url,
        now.readiness,
        reachable=True,
        settled_per_s=settled.per_s,
        partitions=page.value(PARTITIONS),
        lag=page.value(LAG),
        in_flight=page.value(IN_FLIGHT),
        oldest_s=page.value(OLDEST_AGE),
        breakers=tuple((name, value >= 1) for (name,), value in endpoints.items()),
        runs=f"{info[0]} {info[1]}" if info is not None else "",
        calibration=info[2] if is_calibrated and info is not None else ", ".join(code for (code,) in in_force if code),
        is_calibrated=is_calibrated,
        modes=tuple(
            sorted(Counter(mode for (_, mode), value in page.values.get(MODE, {}).items() if value >= 1).items())
        ),
        certified=(sum(value >= 1 for value in certified.values()), len(certified)),
    )
