"""Demo summary: what a demo run has to say for itself, whoever shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.core.cards import Card
from worker.core.certificates import Certificate


@dataclass(frozen=True, slots=True)
class ExampleDecision:
    """One ticket of the run with its decision. `probability` is calibrated; `truth` its label, where it has one."""

    text: str
    language: str | None
    action: str
    """`route` or `escalate`."""
    category: str | None
    probability: float | None
    reason: str
    """Reason code of `core.policy`."""
    sentence: str
    truth: str | None = None
    card: Card | None = None
    """What people are told of it; None where it was routed."""

    @property
    def wrong(self) -> bool:
        """Routed to another category than its label's."""
        return self.action == "route" and self.truth is not None and self.category != self.truth


@dataclass(frozen=True, slots=True)
class DeskSummary:
    """What became of one rule set's tickets.

    `routed` per category and `escalated` per reason code count the first pass. `scored_routes` of the routed were
    decided by a score and `wrong` of those against their label: what alpha (a share, at most delta likely to fail)
    speaks of. Latencies are from a ticket's arrival in the worker to its decision; NaN where there was none.
    """

    rule_set: str
    language: str
    alpha: float
    delta: float
    labelled: int
    """Tickets behind the calibration; none of them is among `tickets`."""
    tickets: int
    routed: Mapping[str, int]
    escalated: Mapping[str, int]
    dead_lettered: int
    scored_routes: int
    wrong: int
    cache_hits: int
    """Over all passes, of `asked` decisions."""
    asked: int
    tickets_per_s: float
    p50_ms: float
    p95_ms: float
    certificates: tuple[Certificate, ...]
    examples: tuple[ExampleDecision, ...]

    @property
    def automation_rate(self) -> float:
        """Share of the tickets that no person has to read."""
        return sum(self.routed.values()) / max(1, self.tickets)


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """One demo run. `notes` are sentences for the foot of the page."""

    created_at: str
    engine: str
    model: str
    hardware: str
    seconds: float
    desks: tuple[DeskSummary, ...]
    notes: tuple[str, ...] = ()
