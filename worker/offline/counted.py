"""Counted: what one side of a backtest did, added up: routes, people's queue, routes that are expected to be wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker.core.binomial import binomial_cdf
from worker.offline.measures import CONFIDENCE, Measured, share

NOBODY = "(no guess)"
"""In place of a category, where nothing was scored."""
HOURS = 24


@dataclass(slots=True)
class Tally:
    """What one side did, added up."""

    ends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    queue: Counter[tuple[str, int]] = field(default_factory=Counter)
    by_hour: Counter[str] = field(default_factory=Counter)
    routed: int = 0
    judged: int = 0
    wrong: float = 0.0
    categories: dict[str, list[float]] = field(default_factory=dict)
    held: Counter[str] = field(default_factory=Counter)
    held_judged: int = 0
    held_wrong: float = 0.0

    def hold(self, category: str | None, probability: float) -> None:
        """A route that the mode held back; it was added as one to people."""
        self.held[category or NOBODY] += 1
        if not math.isnan(probability):
            self.held_judged += 1
            self.held_wrong += 1.0 - probability

    def add(self, routes: bool, end: str, category: str | None, code: str, probability: float, moment: str) -> None:
        self.ends[end] += 1
        self.reasons[code] += 1
        if not routes:
            self.queue[category or NOBODY, int(moment[11:13])] += 1
            self.by_hour[moment[:13]] += 1
            return
        self.routed += 1
        if not math.isnan(probability):  # where a rule routed it, nothing says how sure that is
            self.judged += 1
            self.wrong += 1.0 - probability
            own = self.categories.setdefault(end, [0, 0.0])
            own[0] += 1
            own[1] += 1.0 - probability


@dataclass(frozen=True, slots=True)
class Counted:
    """One side: `n` decisions, of which `routed` went to categories.

    `expected_wrong` of the `judged` routes, those that a score decided, are expected to be wrong: the sum of 1 - p over
    their calibrated probabilities, with the interval that chance leaves if those probabilities are true.
    """

    n: int
    routed: int
    automation: Measured
    judged: int
    expected_wrong: Measured
    expected_error: Measured
    ends: Mapping[str, int]
    """Category, `people`, or another topic of people's."""
    reasons: Mapping[str, int]
    """First reason of each decision."""
    queue: Mapping[str, tuple[int, ...]]
    """Tickets that went to people, by the category that was guessed, for each hour of the day (UTC)."""
    busiest: tuple[str, int] | None
    """The hour in which most tickets went to people, as 2026-03-02T08, and how many."""
    wrong_by_category: Mapping[str, tuple[int, float]]
    """Routes that a score decided, and how many of them are expected to be wrong."""
    held: Mapping[str, int]
    """Routes that the mode held back, by category: with people, as they are counted here."""
    if_auto: Measured
    """The automation rate if every category were in auto."""
    if_auto_wrong: Measured
    """How many of the routes that a score decides are expected to be wrong then."""
    if_auto_error: Measured

    @property
    def people(self) -> int:
        return self.n - self.routed

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values."""
        measured = ("automation", "expected_wrong", "expected_error", "if_auto", "if_auto_wrong", "if_auto_error")
        return {
            "n": self.n,
            "routed": self.routed,
            "judged": self.judged,
            **{name: getattr(self, name).to_dict() for name in measured},
            **{name: dict(getattr(self, name)) for name in ("ends", "reasons", "held")},
            "queue": {category: list(hours) for category, hours in self.queue.items()},
            "busiest": self.busiest,
            "wrong_by_category": {
                name: {"routed": n, "expected_wrong": wrong} for name, (n, wrong) in self.wrong_by_category.items()
            },
        }


def counted(tally: Tally) -> Counted:
    """The side whose decisions were added up."""
    n, judged = tally.ends.total(), tally.judged
    wrong = expected(tally.wrong, judged)
    all_judged = judged + tally.held_judged
    all_wrong = expected(tally.wrong + tally.held_wrong, all_judged)
    queue: dict[str, list[int]] = {}
    for (category, hour), count in tally.queue.items():
        queue.setdefault(category, [0] * HOURS)[hour] += count
    return Counted(
        n=n,
        routed=tally.routed,
        automation=share(tally.routed, n),
        judged=judged,
        expected_wrong=wrong,
        expected_error=_rate(wrong, judged),
        ends=dict(tally.ends.most_common()),
        reasons=dict(tally.reasons.most_common()),
        queue={name: tuple(hours) for name, hours in sorted(queue.items(), key=lambda pair: -sum(pair[1]))},
        busiest=max(tally.by_hour.items(), key=lambda pair: pair[1], default=None),
        wrong_by_category={name: (int(own[0]), own[1]) for name, own in sorted(tally.categories.items())},
        held=dict(tally.held.most_common()),
        if_auto=share(tally.routed + tally.held.total(), n),
        if_auto_wrong=all_wrong,
        if_auto_error=_rate(all_wrong, all_judged),
    )


def _rate(wrong: Measured, judged: int) -> Measured:
    if not judged:
        return Measured(math.nan, 0.0, 1.0)
    return Measured(*(value / judged for value in (wrong.value, wrong.lower, wrong.upper)))


def expected(total: float, n: int) -> Measured:
    """The number of wrong ones among `n` whose chances of being wrong add up to `total`, with the central 95 % of it.

    The number is Poisson-binomial. The interval is that of the binomial with the same mean, which is no narrower
    (Hoeffding 1956): it holds if the probabilities are true, and says nothing about whether they are.
    """
    if n == 0:
        return Measured(math.nan, 0.0, 0.0)
    tail, p = (1.0 - CONFIDENCE) / 2.0, min(1.0, max(0.0, total / n))
    return Measured(total, float(_quantile(tail, n, p)), float(_quantile(1.0 - tail, n, p)))


def _quantile(level: float, n: int, p: float) -> int:
    """The least k with P(Bin(n, p) <= k) >= level."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if binomial_cdf(np.array([middle]), np.array([n]), p)[0] >= level:
            high = middle
        else:
            low = middle + 1
    return low
