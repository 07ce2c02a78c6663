"""Evaluation: an artefact against labelled tickets that it has not seen, decided by the one evaluator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from worker.core.artefact import Artefact
from worker.core.binomial import clopper_pearson_lower
from worker.core.categories import NONE_ID
from worker.core.certificates import Certificate
from worker.core.policy import Calibration, Decision, decide, decide_override
from worker.core.rules import RuleSet
from worker.errors import ArtefactError, ConfigError
from worker.offline.measures import Measured, Measures, measure, share
from worker.offline.near_duplicates import collapse, digest, unpack_digests
from worker.offline.scoring import ScoredTicket
from worker.offline.screening import refuse_partial
from worker.runtime.question import Question

BEYOND_CHANCE = 0.05
"""Level of all tests of alpha together: how often a keeping of the promise is called a break."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One held-out ticket with its decision; `right` is whether the named category is the true one."""

    ticket: ScoredTicket
    decision: Decision
    right: bool

    @property
    def routed(self) -> bool:
        return self.decision.action == "route"


@dataclass(frozen=True, slots=True)
class Routed:
    """`m` of `n` tickets routed, `k` of them wrongly; `risk` is what alpha limits.

    `lower` is the one-sided bound under the true risk (level BEYOND_CHANCE over all tests): above alpha, the promise is
    broken beyond chance.
    """

    name: str
    n: int
    m: int
    k: int
    alpha: float
    risk: Measured
    coverage: Measured
    lower: float

    @property
    def exceeded(self) -> bool:
        """Above alpha in these tickets, which chance alone may do."""
        return self.risk.value > self.alpha

    @property
    def exceeded_beyond_chance(self) -> bool:
        return self.lower > self.alpha


@dataclass(frozen=True, slots=True)
class Slice:
    """Tickets of one category or language: how many there are, how many were named so, and what was routed."""

    name: str
    n: int
    recall: Measured
    """Share of them that were named rightly."""
    precision: Measured
    """Of those named so, the share that is right; for a language the same as recall."""
    routed: int
    wrong: int
    error: Measured
    """Of those routed, the share that is wrong. A category counts what is routed to it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out check. Everything counts one of each kind of near-duplicate."""

    artefact: Artefact
    rule_set: RuleSet
    tickets: int
    near_duplicates: int
    seen: int
    """Left out: they, or near-duplicates of them, are in the labelled set behind the artefact."""
    overridden: int
    unscored: int
    answered: tuple[Answered, ...]
    overall: Routed
    certificates: tuple[Routed, ...]
    """Those under which something was routed."""
    measures: Measures
    categories: tuple[Slice, ...]
    languages: tuple[Slice, ...]
    escalated: tuple[tuple[str, int], ...]
    """Reason code and number, most frequent first."""

    @property
    def exceeded_beyond_chance(self) -> bool:
        """Whether alpha is broken overall or under any certificate, by more than chance explains."""
        return any(part.exceeded_beyond_chance for part in (self.overall, *self.certificates))


def evaluate(question: Question, artefact: Artefact, scored: Iterable[ScoredTicket], *, seed: int) -> Evaluation:
    """Decide every ticket and compare with its label.

    Raises ArtefactError where the artefact was fitted on something else than what scored these tickets, ConfigError
    where no ticket is left, and as `refuse_partial`.
    """
    changed = artefact.fingerprints.differences(question.fingerprints)
    if changed:
        raise ArtefactError(
            f"the calibration was fitted on something else ({', '.join(changed)} changed), so it routes nothing: "
            "run `ticket-router calibrate` again"
        )
    rule_set = question.rule_set
    collapsed = collapse(scored)
    refuse_partial(collapsed.kept)
    fresh = _unseen(collapsed.kept, artefact)
    to_score = [t for t in fresh if decide_override(t.ticket, rule_set) is None]
    tickets = [t for t in to_score if t.problem is None]
    if not tickets:
        raise ConfigError(
            f"no ticket is left to evaluate: of {len(collapsed.kept)}, {len(collapsed.kept) - len(fresh)} were used to "
            f"calibrate, {len(fresh) - len(to_score)} are decided by a rule, and {len(to_score)} could not be scored"
        )
    index = {category: i for i, category in enumerate(rule_set.categories.ids)}
    answered = tuple(_answer(ticket, rule_set, Calibration(artefact), index) for ticket in tickets)
    overall, certificates = _routed(answered, artefact)
    z = [answer.ticket.logprobs for answer in answered]
    return Evaluation(
        artefact=artefact,
        rule_set=rule_set,
        tickets=len(collapsed.kept) + len(collapsed.dropped),
        near_duplicates=len(collapsed.dropped),
        seen=len(collapsed.kept) - len(fresh),
        overridden=len(fresh) - len(to_score),
        unscored=len(to_score) - len(tickets),
        answered=answered,
        overall=overall,
        certificates=certificates,
        measures=measure(
            artefact.calibrator.apply(z),
            [index[a.decision.category or ""] for a in answered],
            [a.decision.probability or 0.0 for a in answered],
            [a.ticket.label for a in answered],
            seed=seed,
        ),
        categories=_by_category(answered, rule_set),
        languages=_by_language(answered),
        escalated=tuple(Counter(a.decision.reasons[0].code for a in answered if not a.routed).most_common()),
    )


def _unseen(tickets: Sequence[ScoredTicket], artefact: Artefact) -> list[ScoredTicket]:
    packed = artefact.data.get("seen", "")
    try:
        seen = unpack_digests(packed if isinstance(packed, str) else "")
    except ValueError as error:
        raise ArtefactError("data.seen of the calibration is not base64: calibrate again") from error
    return [ticket for ticket in tickets if digest(ticket.text) not in seen]


def _answer(ticket: ScoredTicket, rule_set: RuleSet, calibration: Calibration, index: Mapping[str, int]) -> Answered:
    decision = decide(ticket.scores, rule_set, calibration)
    return Answered(ticket, decision, index.get(decision.category or "", -2) == ticket.label)


def _routed(answered: Sequence[Answered], artefact: Artefact) -> tuple[Routed, tuple[Routed, ...]]:
    """All tickets together, and each certificate under which something was routed, tested at a joint level."""
    parts: list[tuple[Certificate, list[Answered]]] = []
    for certificate in artefact.certificates:
        members = set(certificate.members)
        rows = [a for a in answered if a.decision.category in members]
        if any(a.routed for a in rows):
            parts.append((certificate, rows))
    level = BEYOND_CHANCE / (len(parts) + 1 if len(parts) > 1 else 1)
    certificates = tuple(
        # The looser target counts misroutes per ticket of all traffic, of which the group is only a part.
        _count(c.group, rows, len(answered) if c.procedure == "misroutes_per_ticket" else None, c.alpha, level)
        for c, rows in parts
    )
    alpha = _mean_alpha(certificates) if certificates else max((c.alpha for c in artefact.certificates), default=0.0)
    per_ticket = any(c.procedure == "misroutes_per_ticket" for c in artefact.certificates)
    return _count("all", answered, len(answered) if per_ticket else None, alpha, level), certificates


def _count(name: str, rows: Sequence[Answered], traffic: int | None, alpha: float, level: float) -> Routed:
    m = sum(a.routed for a in rows)
    k = sum(a.routed and not a.right for a in rows)
    out_of = m if traffic is None else traffic
    lower = clopper_pearson_lower(k, out_of, level) if out_of else 0.0
    return Routed(name, len(rows), m, k, alpha, share(k, out_of), share(m, len(rows)), lower)


def _mean_alpha(parts: Sequence[Routed]) -> float:
    """What the certificates allow together: alpha itself where it is the same for all."""
    if len({part.alpha for part in parts}) == 1:
        return parts[0].alpha
    return sum(part.alpha * part.m for part in parts) / sum(part.m for part in parts)


def _by_category(answered: Sequence[Answered], rule_set: RuleSet) -> tuple[Slice, ...]:
    ids = rule_set.categories.ids
    slices = []
    for index, category in enumerate(ids):
        named = [a for a in answered if a.decision.category == category]
        own = [a for a in answered if a.ticket.label == index]
        slices.append(_slice(category, own, named))
    if any(a.ticket.label < 0 for a in answered) and NONE_ID not in ids:
        slices.append(_slice(f"({NONE_ID})", [a for a in answered if a.ticket.label < 0], []))
    return tuple(slices)


def _by_language(answered: Sequence[Answered]) -> tuple[Slice, ...]:
    parts: dict[str, list[Answered]] = {}
    for answer in answered:
        parts.setdefault(answer.ticket.language or "not stated", []).append(answer)
    return tuple(_slice(language, rows, rows) for language, rows in sorted(parts.items()))


def _slice(name: str, own: Sequence[Answered], named: Sequence[Answered]) -> Slice:
    routed = [a for a in named if a.routed]
    wrong = sum(not a.right for a in routed)
    return Slice(
        name=name,
        n=len(own),
        recall=share(sum(a.right for a in own), len(own)),
        precision=share(sum(a.right for a in named), len(named)),
        routed=len(routed),
        wrong=wrong,
        error=share(wrong, len(routed)),
    )
