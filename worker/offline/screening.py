"""Screening: which tickets of a labelled file a score decides at all. No label is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.core.digest import fingerprint
from worker.core.policy import decide_override
from worker.core.rules import RuleSet
from worker.errors import ConfigError
from worker.offline.near_duplicates import Collapsed, collapse
from worker.offline.scoring import ScoredTicket


@dataclass(frozen=True, slots=True)
class Screened:
    """What became of the labelled tickets before anything was fitted; no label was looked at. By rising id."""

    labelled: int
    digest: str
    collapsed: Collapsed
    overridden: tuple[ScoredTicket, ...]
    """A rule decides them, and no score does."""
    unscored: tuple[ScoredTicket, ...]
    low_mass: tuple[ScoredTicket, ...]
    usable: tuple[ScoredTicket, ...]


def screen_tickets(scored: Iterable[ScoredTicket], rule_set: RuleSet) -> Screened:
    """Near-duplicates collapsed, and out of the way what no score decides.

    Raises ConfigError where nothing is left, and as `refuse_partial`.
    """
    tickets = sorted(scored, key=lambda ticket: ticket.id)
    refuse_partial(tickets)
    digest = fingerprint("labelled/1", *((t.id, t.text, t.label) for t in tickets))
    collapsed = collapse(tickets)
    overridden, unscored, low_mass, usable = [], [], [], []
    for ticket in collapsed.kept:
        if decide_override(ticket.ticket, rule_set) is not None:
            overridden.append(ticket)
        elif ticket.problem is not None:
            unscored.append(ticket)
        elif ticket.mass < rule_set.rules.gates.min_label_mass:
            low_mass.append(ticket)
        else:
            usable.append(ticket)
    if not usable:
        raise ConfigError(
            f"none of {len(tickets)} labelled tickets can be used: {len(collapsed.dropped)} are near-duplicates, "
            f"{len(overridden)} are decided by a rule, {len(unscored)} could not be scored, and on {len(low_mass)} the "
            "labels have too little probability (a wrong prompt style, or a thinking model: `ticket-router selftest`)"
        )
    groups = (tuple(overridden), tuple(unscored), tuple(low_mass), tuple(usable))
    return Screened(len(tickets), digest, collapsed, *groups)


def reaching_the_score(tickets: Sequence[ScoredTicket], rule_set: RuleSet) -> list[ScoredTicket]:
    """One of each kind, scored, and decided by no rule. Raises ConfigError as `refuse_partial`."""
    refuse_partial(tickets)
    return [
        ticket
        for ticket in collapse(tickets).kept
        if ticket.problem is None and decide_override(ticket.ticket, rule_set) is None
    ]


def refuse_partial(tickets: Sequence[ScoredTicket]) -> None:
    """Raises ConfigError where an engine did not return every label of a ticket.

    Nothing is fitted or measured on bounds; and to leave such tickets out would certify others than a worker meets.
    """
    scored = [ticket for ticket in tickets if ticket.problem is None]
    partial = sum(bool(ticket.unknown) for ticket in scored)
    if partial:
        most = max(len(ticket.unknown) for ticket in scored)
        raise ConfigError(
            f"on {partial} of {len(scored)} tickets the engine did not return every label (up to {most} of "
            f"{len(scored[0].logprobs)} are missing), and nothing can be fitted or measured on what was not returned: "
            "use an engine that returns all of them (SGLang; vLLM with logprob_token_ids), let the server return more "
            "(vLLM: --max-logprobs), or ask about fewer categories"
        )
