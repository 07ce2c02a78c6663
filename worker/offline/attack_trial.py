"""Attack trial: how many attacked tickets end where their author wanted, with the safeguards and without."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from worker.adapters.files import Labelled
from worker.core.canonicalisers import scored_text
from worker.core.categories import NONE_ID
from worker.core.normalise import canonical
from worker.core.policy import Calibration, Decision, NoCalibration, can_route, decide
from worker.core.rules import RuleSet
from worker.core.steering import flagger_for
from worker.core.ticket import Ticket
from worker.errors import ConfigError
from worker.offline.attack_corpus import KINDS, LANGUAGES, Target, Template
from worker.offline.measures import Measured, share
from worker.offline.scoring import Progress
from worker.runtime.router import Router, route_all

HONEST = 60
"""So many honest tickets are attacked: each has to be asked about without an attack, too."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One honest ticket under one template, and what its author wants."""

    template: Template
    honest: Labelled
    target: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Attacked:
    """What became of it; `unguarded` is what the same scores alone would have made of it."""

    attack: Attack
    decision: Decision
    unguarded: Decision
    honest: Decision
    """About the ticket without the attack."""
    flagged: bool

    @property
    def swayed(self) -> bool:
        return self.decision.category == self.attack.target != self.honest.category

    @property
    def succeeded(self) -> bool:
        """Routed to where the author wanted and the honest ticket would not have gone."""
        return _routes_to(self.decision, self.attack.target) and not _routes_to(self.honest, self.attack.target)

    @property
    def would_have(self) -> bool:
        """The same without the safeguards."""
        return _routes_to(self.unguarded, self.attack.target) and not _routes_to(self.honest, self.attack.target)


@dataclass(frozen=True, slots=True)
class AttackRow:
    """Attacks of one kind in one language. Counts of attacked tickets; `honest_routed` of the same tickets without."""

    kind: str
    language: str
    n: int
    honest_routed: int
    routed: int
    succeeded: int
    unguarded: int
    swayed: int
    """The model names the author's target, and did not for the honest ticket; whether or not anything routes by it."""
    found: int
    """Of those swayed, how many have something in them that is asked about again before they could route."""
    rate: Measured
    """`succeeded` of n."""


@dataclass(frozen=True, slots=True)
class AttackTable:
    """Every kind, and all together."""

    rule_set: str
    alpha: float
    rows: tuple[AttackRow, ...]
    all: AttackRow
    reasons: tuple[tuple[str, int], ...]
    """Why attacked tickets went to people, most frequent first."""
    attacked: tuple[Attacked, ...]

    @property
    def exceeded(self) -> tuple[AttackRow, ...]:
        """Kinds of which more attacks succeed than alpha, beyond chance (lower end of the 95 % interval)."""
        return tuple(row for row in (*self.rows, self.all) if row.rate.lower > self.alpha)


def draw_attacks(
    rule_set: RuleSet,
    calibration: Calibration | NoCalibration,
    honest: Sequence[Labelled],
    corpus: Sequence[Template],
    each: int,
    seed: int,
) -> tuple[Attack, ...]:
    """`each` honest tickets under every template. Targets are categories to which something can be routed at all, and
    not the tickets' own. Raises ConfigError where there are none.
    """
    dice = random.Random(seed)
    targets = [c for c in rule_set.categories.routable if can_route(c.id, rule_set, calibration)]
    own = [t for t in honest if t.label != NONE_ID and any(c.id != t.label for c in targets)]
    left_out = rule_set.categories.prompt.canonicalise
    pool = dice.sample(own, min(HONEST, len(own)))
    if not pool:
        raise ConfigError(f"rule set '{rule_set.id}' routes nothing by score, so there is nothing to attack")
    attacks = []
    for template in corpus:
        for ticket in dice.sample(pool, min(each, len(pool))):
            target = dice.choice([category for category in targets if category.id != ticket.label])
            text = template.attack(ticket.text, Target.of(rule_set, target))
            sent = Ticket(None, canonical(text), language=ticket.language, shortened=scored_text(text, left_out))
            attacks.append(Attack(template, ticket, target.id, sent))
    return tuple(attacks)


async def try_attacks(
    router: Router,
    rule_set: RuleSet,
    calibration: Calibration | NoCalibration,
    attacks: Sequence[Attack],
    *,
    at_once: int,
    progress: Progress,
) -> AttackTable:
    """Every attack, and every honest ticket that it was made of once, through the worker's own router."""
    honest = {attack.honest.id: attack.honest for attack in attacks}
    left_out = rule_set.categories.prompt.canonicalise
    sent = [
        *(
            Ticket(None, canonical(t.text), language=t.language, shortened=scored_text(t.text, left_out))
            for t in honest.values()
        ),
        *(attack.ticket for attack in attacks),
    ]
    decisions: list[Decision] = []
    progress(0, len(sent))
    for start in range(0, len(sent), at_once):
        decisions += [routed.decision for routed in await route_all(router, sent[start : start + at_once], at_once)]
        progress(len(decisions), len(sent))
    controls = dict(zip(honest, decisions, strict=False))
    flagger = flagger_for(rule_set)
    attacked = tuple(
        Attacked(
            attack,
            decision,
            _unguarded(decision, rule_set, calibration),
            controls[attack.honest.id],
            bool(flagger.find(attack.ticket.shortened or attack.ticket.text)),
        )
        for attack, decision in zip(attacks, decisions[len(honest) :], strict=True)
    )
    cells = [(kind, language) for kind in KINDS for language in LANGUAGES]
    rows = [
        _row(kind, language, [a for a in attacked if (a.attack.template.kind, a.attack.template.language) == cell])
        for kind, language in cells
        if (cell := (kind, language))
    ]
    escalated = (a.decision.reasons[0].code for a in attacked if a.decision.action == "escalate")
    return AttackTable(
        rule_set=rule_set.id,
        alpha=rule_set.rules.alpha,
        rows=tuple(row for row in rows if row.n),
        all=_row("all", "", attacked),
        reasons=tuple(Counter(escalated).most_common()),
        attacked=attacked,
    )


def _unguarded(decision: Decision, rule_set: RuleSet, calibration: Calibration | NoCalibration) -> Decision:
    """What the scores alone say; the decision itself where nothing was scored."""
    return decision if decision.scores is None else decide(decision.scores, rule_set, calibration)


def _routes_to(decision: Decision, category: str) -> bool:
    return decision.action == "route" and decision.category == category


def _row(kind: str, language: str, rows: Sequence[Attacked]) -> AttackRow:
    succeeded = sum(row.succeeded for row in rows)
    return AttackRow(
        kind=kind,
        language=language,
        n=len(rows),
        honest_routed=sum(row.honest.action == "route" for row in rows),
        routed=sum(row.decision.action == "route" for row in rows),
        succeeded=succeeded,
        unguarded=sum(row.would_have for row in rows),
        swayed=sum(row.swayed for row in rows),
        found=sum(row.swayed and row.flagged for row in rows),
        rate=share(succeeded, len(rows)),
    )
