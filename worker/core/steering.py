"""Steering: whether a ticket that would route does so for what it is about, or for what it tells the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from worker.core.categories import NONE_ID
from worker.core.policy import Decision, reason, vetoed
from worker.core.rules import RuleSet
from worker.core.suspicion import Flagger, Passage

Checked = Literal["unchecked", "agreed", "steered"]
"""What came of a ticket in which something addresses the router: left alone, the same without it, or not the same."""


def flagger_for(rule_set: RuleSet) -> Flagger:
    """What is a label, a name or a cue to this rule set. `none` is no target: its tickets go to people anyway."""
    categories, style = rule_set.categories, rule_set.categories.prompt
    words = [word for c in categories.categories if c.id != NONE_ID for word in (c.label or c.id, c.name)]
    if categories.two_levels is not None:
        words += [word for d in categories.two_levels.departments for word in (d.label or d.id, d.name)]
    return Flagger(words, (style.answer_cue, style.ticket_heading, categories.first_cue))


def still_routes(
    decision: Decision, again: Decision | None, rule_set: RuleSet, passages: Sequence[Passage]
) -> Decision:
    """`decision`, to route, where the ticket without the passages routes to the same category; else to people.

    `again` is the decision without them, None where they are the whole ticket.
    """
    if again is not None and (again.action, again.category) == (decision.action, decision.category):
        return decision
    if again is None:
        what = "nothing is left"
    elif again.action == "route":
        what = f"it would go to '{again.category}'"
    else:
        what = "it would not be routed"
    count = len(passages)
    parts = f"{count} parts" if count > 1 else "one part"
    return vetoed(decision, rule_set, reason("steered", parts=parts, what=what))
