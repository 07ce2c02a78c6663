"""Cards: what a person is told of a ticket that came to people, and how the person's answer will come back.

In shadow a card suggests nothing, and does not say by its reason what the score was: who is to be compared with the
model must not have seen what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import orjson
from pydantic import TypeAdapter

from worker.core.answer_events import ANSWER_SCHEMA
from worker.core.categories import NONE_ID
from worker.core.certificates import ScoreForm
from worker.core.envelope import Envelope, Nearest, Origin, Ranked, Reason
from worker.core.korean import in_korean, nearest_in_korean
from worker.core.modes import Mode
from worker.core.per_ticket import per_ticket
from worker.core.policy import TOP, reason
from worker.core.rules import RuleSet

CARD_SCHEMA: Literal["ticket-router/card/1"] = "ticket-router/card/1"
SUGGESTIVE = frozenset({
    "certified", "below_threshold", "inside_flip_band", "uncertified_category", "certificate_too_weak",
    "low_label_mass", "label_not_returned", "none_of_the_above", "steered", "other_order", "assist_mode", "override",
})  # fmt: skip
"""Reasons that tell what the ticket was taken for, or how surely; in shadow nobody is told."""


@per_ticket
class Told:
    """The same in two languages."""

    en: str
    ko: str


@per_ticket
class Suggestion:
    """One of the likeliest categories."""

    category: str
    title: str
    """The category's name."""
    topic: str | None
    """Where such tickets go; None for `none`."""
    probability: float | None
    """Calibrated; None without a calibration in force."""


@per_ticket
class Why:
    """One reason of the decision."""

    code: str
    text: Told


@per_ticket
class WhatWouldHave:
    """What would have routed the ticket: the first gate that stayed closed, and the certified threshold."""

    category: str
    title: str
    gate: Literal["label_mass", "none_of_the_above", "stability", "certificate", "threshold"] | None
    """None: every gate was open, and something else sent it to people."""
    value: float | None
    """What the ticket has at that gate."""
    needed: float | None
    """What it takes there; None where nothing would do."""
    score: float
    threshold: float | None
    """The certificate's; None where there is no certificate in force, or none is needed to be passed."""
    form: ScoreForm
    certified: bool
    """Whether a certificate is in force for the category."""
    short_by: float | None
    """Of the threshold; None where there is none, or where it was passed."""
    text: Told


@per_ticket
class Known:
    """A ticket with the same text."""

    ticket_id: str
    decision_id: str
    decided_at: str


@per_ticket
class Duplicates:
    """Tickets of the same tenant with the same text as it is scored, that this worker decided before."""

    known: int
    tickets: tuple[Known, ...]
    """The first of them."""
    scope: Literal["worker"] = "worker"
    """One worker's memory, which is bounded and begins anew with it: others' tickets are not known."""


@per_ticket
class AnswerStub:
    """What of an answer event is known beforehand: copy it, and add `answered_at` and what was found."""

    schema: Literal["ticket-router/answer/1"]
    decision_id: str
    ticket_id: str
    origin: Origin


@per_ticket
class HowToAnswer:
    """The event by which the person's answer comes back."""

    topic: str | None
    """Where to; None where the rule set names none (`topics.answers`)."""
    event: AnswerStub
    one_of: tuple[Literal["category"], Literal["not_a_ticket"], Literal["duplicate_of"]] = (
        "category", "not_a_ticket", "duplicate_of",
    )  # fmt: skip


@per_ticket
class Card:
    """One ticket that waits for a person."""

    schema: Literal["ticket-router/card/1"]
    decision_id: str
    ticket_id: str
    tenant: str | None
    origin: Origin
    decided_at: str
    rule_set: str
    mode: Mode
    suggestions: tuple[Suggestion, ...]
    """The likeliest first; empty in shadow, and where nothing was scored."""
    reasons: tuple[Why, ...]
    nearest: WhatWouldHave | None
    """None in shadow, and where nothing was scored under a calibration in force."""
    duplicates: Duplicates | None
    """None where it was not looked for."""
    answer: HowToAnswer

    def to_bytes(self) -> bytes:
        return orjson.dumps(self)


def make_card(envelope: Envelope, rule_set: RuleSet, duplicates: Duplicates | None = None) -> Card:
    """The card of a decision that went to people."""
    shown = blinded(envelope) if envelope.mode == "shadow" else envelope
    return Card(
        schema=CARD_SCHEMA,
        decision_id=envelope.decision_id,
        ticket_id=envelope.ticket_id,
        tenant=envelope.tenant,
        origin=envelope.origin,
        decided_at=envelope.decided_at,
        rule_set=envelope.rule_set,
        mode=envelope.mode,
        suggestions=suggestions_of(shown, rule_set),
        reasons=tuple(Why(why.code, Told(why.sentence, in_korean(why))) for why in shown.reasons),
        nearest=None if shown.nearest is None else _what_would_have(shown.nearest, rule_set),
        duplicates=duplicates,
        answer=HowToAnswer(
            topic=rule_set.rules.topics.answers,
            event=AnswerStub(ANSWER_SCHEMA, envelope.decision_id, envelope.ticket_id, envelope.origin),
        ),
    )


def blinded(envelope: Envelope) -> Envelope:
    """The decision without anything that says what the ticket was taken for. The record keeps the whole."""
    told: Sequence[Reason] = tuple(why for why in envelope.reasons if why.code not in SUGGESTIVE)
    return replace(
        envelope,
        category=None,
        probability=None,
        top=(),
        margin=None,
        label_mass=None,
        reasons=tuple(told) or (reason("shadow_mode"),),
        label_scores=None,
        label_scores_bound=None,
        answers=(),
        would=None,
        nearest=None,
    )


def card_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the card."""
    schema = TypeAdapter(Card).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Card"}


def nearest_in_english(nearest: Nearest, title: str) -> str:
    """What would have routed the ticket, in one or two sentences."""
    certificate = nearest.certificate
    bar = None if certificate is None else certificate.threshold
    if nearest.gate == "none_of_the_above":
        return "The model finds that no category fits: no score would have routed the ticket."
    if certificate is None:
        return (
            f"No score would have routed the ticket to '{title}': no certificate is in force for it. The ticket has "
            f"{nearest.score:.4g}."
        )
    if nearest.gate is None:
        above = f" is above the threshold {bar:.4g}" if bar is not None else " is enough"
        return f"It could have gone to '{title}': its score {nearest.score:.4g}{above}."
    if nearest.gate == "threshold" and bar is not None:
        return (
            f"It would have been routed to '{title}' with a score above {bar:.4g}; it has {nearest.score:.4g}, "
            f"{bar - nearest.score:.4g} too little."
        )
    what = "The labels' total probability" if nearest.gate == "label_mass" else "The lead of the first over the second"
    has = "unknown" if nearest.value is None else f"{nearest.value:.4g}"
    needs = "nothing would do" if nearest.needed is None else f"it takes {nearest.needed:.4g}"
    then = f"a score above {bar:.4g}" if bar is not None else "any score"
    return f"{what} is {has}, and {needs}. Past that, {then} would go to '{title}'; the ticket has {nearest.score:.4g}."


def suggestions_of(envelope: Envelope, rule_set: RuleSet) -> tuple[Suggestion, ...]:
    """The likeliest categories, at most `TOP`; none where nothing was scored and no rule named one."""
    if envelope.top:
        return tuple(_suggestion(each.category, each.probability, rule_set) for each in envelope.top[:TOP])
    if envelope.label_scores is not None:  # uncalibrated: the order is the model's, and nothing says how sure it is
        pairs = zip(envelope.labels, envelope.label_scores, strict=True)
        known = [Ranked(name, score) for name, score in pairs if score is not None]
        known.sort(key=lambda each: -each.probability)
        return tuple(_suggestion(each.category, None, rule_set) for each in known[:TOP])
    if envelope.category is not None:  # a rule said so
        return (_suggestion(envelope.category, None, rule_set),)
    return ()


def _suggestion(category: str, probability: float | None, rule_set: RuleSet) -> Suggestion:
    topic = None if category == NONE_ID else rule_set.categories.topic(category)
    return Suggestion(category, rule_set.categories.title(category), topic, probability)


def _what_would_have(nearest: Nearest, rule_set: RuleSet) -> WhatWouldHave:
    title = rule_set.categories.title(nearest.category)
    threshold = None if nearest.certificate is None else nearest.certificate.threshold
    short = None if threshold is None or nearest.score > threshold else threshold - nearest.score
    return WhatWouldHave(
        category=nearest.category,
        title=title,
        gate=nearest.gate,
        value=nearest.value,
        needed=nearest.needed,
        score=nearest.score,
        threshold=threshold,
        form=nearest.form,
        certified=nearest.certificate is not None,
        short_by=short,
        text=Told(nearest_in_english(nearest, title), nearest_in_korean(nearest, title)),
    )
