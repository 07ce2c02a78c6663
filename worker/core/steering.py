"""Steering: whether a ticket that would route does so for what it is about, or for what it tells the router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from worker.core.categories import NONE_ID
from worker.core.policy import Decision, reason, vetoed
from worker.core.rules import RuleSet
from worker.core.suspicion import Flagger, Passage, without

Checked = Literal["unchecked", "agreed", "steered"]
"""What came of a ticket in which something addresses the router: left alone, the same without it, or not the same."""


def flagger_for(rule_set: RuleSet) -> Flagger:
    """What is a label, a name or a cue to this rule set. `none` is no target: its tickets go to people anyway."""
    categories, style = rule_set.categories, rule_set.categories.prompt
    words = [word for c in categories.categories if c.id != NONE_ID for word in (c.label or c.id, c.name)]
    if categories.two_levels is not None:
        words += [word for d in categories.two_levels.departments for word in (d.label or d.id, d.name)]
    examples = [example for category in categories.routable for example in category.examples]
    return Flagger(words, (style.answer_cue, style.ticket_heading, categories.first_cue), examples)


MOST_ROUNDS: Final = 8
"""Taking something out may set together what addresses the router, too; an author may foresee some of that."""


@dataclass(frozen=True, slots=True)
class Left:
    """A ticket without what addresses the router."""

    text: str
    """Canonical; empty where nothing is left."""
    parts: int
    """Left out."""
    settled: bool
    """False: something in it addresses the router still."""


def left_of(text: str, find: Callable[[str], Sequence[Passage]]) -> Left:
    """What is left when passages are taken out until there are none. `text` is canonical."""
    parts = 0
    for _ in range(MOST_ROUNDS):
        passages = find(text)
        if not passages:
            return Left(text, parts, settled=True)
        parts += len(passages)
        text = without(text, passages)
    return Left(text, parts, settled=not find(text))


def still_routes(decision: Decision, again: Decision | None, rule_set: RuleSet, left: Left) -> Decision:
    """`decision`, to route, where what is left of the ticket routes to the same category; else to people.

    `again` is the decision about that, None where it was not asked about: nothing is left, or it is not settled.
    """
    if again is not None and (again.action, again.category) == (decision.action, decision.category):
        return decision
    if again is None:
        what = "nothing is left" if left.settled else "what is left does so, too"
    elif again.action == "route":
        what = f"it would go to '{again.category}'"
    else:
        what = "it would not be routed"
    parts = f"{left.parts} parts" if left.parts > 1 else "one part"
    return vetoed(decision, rule_set, reason("steered", parts=parts, what=what))
