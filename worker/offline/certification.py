"""Certification: which labelled tickets stand for what the worker would route, and the certificates they carry.

What is certified is what is routed: every ticket goes through `core.policy.decide` under certificates that accept
everything, so the gates are the worker's own, and the score is that of `core.score_form`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from worker.core.artefact import Artefact
from worker.core.certificate_groups import Group, form_groups
from worker.core.certificates import Certificate, ScoreForm
from worker.core.guarantees import (
    FROZEN_MIN_SCORES,
    FrozenThresholds,
    Subject,
    certify,
    certify_frozen,
    certify_misroutes,
    freeze_thresholds,
    n_min,
)
from worker.core.policy import Calibration, decide
from worker.core.rules import Demand, RuleSet
from worker.core.score_form import routed_label
from worker.offline.scoring import ScoredTicket

Target = Literal["error_among_routed", "misroutes_per_ticket"]
Rates = tuple[float, float]
"""(alpha, delta)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ticket as the worker would see it, but for its threshold.

    `predicted` is the label index that would be routed, `score` what is compared with the threshold, `probability`
    what people are shown. `gate` is the reason code that keeps the ticket from routing at any threshold, else None.
    """

    ticket: ScoredTicket
    predicted: int
    score: float
    probability: float
    gate: str | None

    @property
    def wrong(self) -> bool:
        """A ticket of no category is wrong wherever it is routed to."""
        return self.predicted != self.ticket.label


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be certified. Rates are shares; `parents` gives the node of a taxonomy above a category or node.

    `excluded` categories never route; that was decided without the errors that certify.
    """

    alpha: float
    delta: float
    form: ScoreForm
    joint: bool = False
    target: Target = "error_among_routed"
    excluded: frozenset[str] = frozenset()
    parents: Mapping[str, str] | None = None


def candidates(tickets: Iterable[ScoredTicket], rule_set: RuleSet, artefact: Artefact) -> tuple[Candidate, ...]:
    """Each scored ticket under the artefact's form, calibrator, label mass and margin gate; its certificates are not
    looked at.
    """
    accepting = Calibration(artefact.model_copy(update={"certificates": (_accept_all(rule_set, artefact.form),)}))
    found = []
    for ticket in tickets:
        decision = decide(ticket.scores, rule_set, accepting)
        routed = routed_label(artefact.form, artefact.calibrator, ticket.logprobs)
        gate = None if decision.action == "route" else decision.reasons[0].code
        probability = math.nan if decision.probability is None else decision.probability
        found.append(Candidate(ticket, routed.index, routed.score, probability, gate))
    return tuple(found)


def certify_candidates(
    found: Sequence[Candidate], rule_set: RuleSet, plan: Plan, unlabelled: Sequence[Candidate] | None = None
) -> tuple[Certificate, ...]:
    """Every routable category in exactly one certificate.

    Where `unlabelled` candidates are given, thresholds are fixed on those beforehand: at least 500 of them must pass
    the gates, and they must be independent of the labelled ones. Raises ValueError.
    """
    ids = rule_set.categories.ids
    routable = [row for row in found if row.gate is None]
    if plan.target == "misroutes_per_ticket":
        return _misroutes(found, rule_set, plan)
    by_category: dict[str, list[Candidate]] = {}
    for row in routable:
        by_category.setdefault(ids[row.predicted], []).append(row)
    counts = {c.id: len(by_category.get(c.id, ())) for c in rule_set.categories.routable}
    groups = _groups(counts, rule_set, plan, 1)
    if plan.joint:
        # A smaller level needs larger groups, which makes fewer of them: the first count is enough to divide by.
        groups = _groups(counts, rule_set, plan, max(1, sum(group.basis != "excluded" for group, _ in groups)))
    fixed = None
    if unlabelled is not None:
        fixed = _Frozen([(ids[row.predicted], row.score) for row in unlabelled if row.gate is None])
    certificates = []
    for group, (alpha, delta) in groups:
        rows = [row for name in group.members for row in by_category.get(name, ())]
        scores, errors = [row.score for row in rows], [int(row.wrong) for row in rows]
        subject = Subject(group.name, group.members, group.basis, plan.form)
        if group.basis == "excluded":
            certificates.append(_excluded(subject, len(rows), alpha, delta))
        elif fixed is None:
            certificates.append(certify(scores, errors, alpha=alpha, delta=delta, subject=subject))
        else:
            thresholds = fixed.thresholds(group.members)
            certificates.append(certify_frozen(scores, errors, thresholds, alpha=alpha, delta=delta, subject=subject))
    return tuple(certificates)


def demand_of(category: str, rule_set: RuleSet, plan: Plan) -> Rates:
    """What the rules state for the category by name, else what the plan is made for."""
    own = rule_set.rules.categories.get(category, Demand())
    alpha = plan.alpha if own.alpha is None else own.alpha
    return alpha, plan.delta if own.delta is None else own.delta


def is_stricter(demand: Rates, plan: Plan) -> bool:
    """Whether a certificate for the plan's rates would be too weak."""
    return demand[0] < plan.alpha or demand[1] < plan.delta


def _groups(counts: Mapping[str, int], rule_set: RuleSet, plan: Plan, share: int) -> list[tuple[Group, Rates]]:
    """Groups from counts alone, each with its alpha and its part of delta.

    A category with a stricter demand than the rest stands alone, whatever its count: a pool's certificate would not
    satisfy it. One with a looser demand stands alone where it can, and else joins the others at their rates.
    """
    alone: list[tuple[Group, Rates]] = []
    together: dict[str, int] = {}
    for name, count in counts.items():
        alpha, delta = demand = demand_of(name, rule_set, plan)
        stricter = is_stricter(demand, plan)
        looser = not stricter and demand != (plan.alpha, plan.delta)
        if stricter or (looser and count >= 2 * n_min(alpha, delta / share)):
            basis: Literal["own", "excluded"] = "excluded" if count == 0 or name in plan.excluded else "own"
            alone.append((Group(name, (name,), count, basis), (alpha, delta / share)))
        else:
            together[name] = count
    rates = (plan.alpha, plan.delta / share)
    # No category has more tickets than all of them: nobody stands alone, and all that may route are one pool.
    fewest = sum(counts.values()) + 1 if rule_set.rules.certify == "together" else n_min(*rates)
    formed = form_groups(together, fewest=fewest, parents=plan.parents, excluded=plan.excluded)
    return [*((group, rates) for group in formed), *alone]


def _misroutes(found: Sequence[Candidate], rule_set: RuleSet, plan: Plan) -> tuple[Certificate, ...]:
    """One certificate over all traffic that reaches the score: a ticket that a gate stops is never misrouted.

    A category with a stricter demand of its own is left out: this target says nothing about single categories.
    """
    ids = rule_set.categories.ids
    names = [c.id for c in rule_set.categories.routable]
    out = {n for n in names if n in plan.excluded or is_stricter(demand_of(n, rule_set, plan), plan)}
    members = tuple(name for name in names if name not in out)
    routes = [row.gate is None and ids[row.predicted] not in out for row in found]
    certificates = []
    if members:
        certificate = certify_misroutes(
            [row.score if may else -math.inf for row, may in zip(found, routes, strict=True)],
            [int(row.wrong and may) for row, may in zip(found, routes, strict=True)],
            alpha=plan.alpha,
            delta=plan.delta,
            subject=Subject("all", members, "all", plan.form),
        )
        routed = sum(may and certificate.routes(row.score) for row, may in zip(found, routes, strict=True))
        certificates.append(replace(certificate, m=routed))
    counts = Counter(ids[row.predicted] for row in found if row.gate is None)
    for name in names:
        if name in out:
            subject = Subject(name, (name,), "excluded", plan.form)
            certificates.append(_excluded(subject, counts[name], *demand_of(name, rule_set, plan)))
    return tuple(certificates)


class _Frozen:
    """Thresholds for a group from its own unlabelled scores where they are enough, else from all of them.

    Both are fixed without a label.
    """

    def __init__(self, scored: Sequence[tuple[str, float]]) -> None:
        if len(scored) < FROZEN_MIN_SCORES:
            raise ValueError(
                f"{len(scored)} unlabelled tickets pass the gates, and frozen thresholds need {FROZEN_MIN_SCORES}"
            )
        self._scored = scored
        self._all = freeze_thresholds([score for _, score in scored])

    def thresholds(self, members: Sequence[str]) -> FrozenThresholds:
        own = [score for category, score in self._scored if category in members]
        return freeze_thresholds(own) if len(own) >= FROZEN_MIN_SCORES else self._all


def _accept_all(rule_set: RuleSet, form: ScoreForm) -> Certificate:
    """Obeyed by nobody but `candidates`; its rates are below every demand."""
    members = tuple(c.id for c in rule_set.categories.routable)
    return Certificate("open", members, "all", "rank", form, 0, 0, 0, 0.0, 0.0, 0.0, -math.inf, None)


def _excluded(subject: Subject, n: int, alpha: float, delta: float) -> Certificate:
    return Certificate(
        subject.group, subject.members, "excluded", "rank", subject.score, n, 0, 0, alpha, delta, 0.0, math.inf, None
    )
