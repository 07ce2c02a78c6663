"""The only evaluator: one ticket and its label scores to one decision, which carries its own reasons.

Nothing routes on an uncalibrated score: the label that is routed and the number that is compared with the threshold
are those that the certificate was issued for, or the ticket goes to people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from worker.core.artefact import Artefact, Fingerprints
from worker.core.categories import NONE_ID
from worker.core.envelope import Ranked, Reason
from worker.core.rules import RuleSet
from worker.core.score_form import RoutedLabel, max_probability, raw_margin
from worker.core.scores import LabelScores
from worker.core.ticket import Ticket

TOP = 3
"""How many categories a decision names."""

REASONS: Mapping[str, str] = {
    "certified": "The score {score} is above the certified threshold {threshold}: at most {promise}, with {confidence} "
    "confidence.",
    "override": "Rule '{name}' routes this ticket without a score.",
    "override_escalation": "Rule '{name}' sends this ticket to a person.",
    "below_threshold": "The score {score} is not above the certified threshold {threshold}.",
    "inside_flip_band": "The first two are {margin} apart, and below {gate} the engine may change its mind when asked "
    "again.",
    "uncertified_category": "Category '{category}' has no certificate: {detail}.",
    "certificate_too_weak": "The certificate of '{category}' states at most {stated}, and the rules demand at most "
    "{demanded}.",
    "low_label_mass": "The labels together have probability {mass}, and {floor} is demanded: the model wants to say "
    "something else.",
    "none_of_the_above": "The model finds that no category fits.",
    "uncalibrated": "There is no calibration for this rule set: {detail}.",
    "fingerprint_changed": "The calibration was fitted on something else: {detail} changed.",
    "labels_untrusted": "The engine failed the start-up check: {detail}.",
    "too_long": "The ticket does not fit the model: {detail}.",
    "engine_unavailable": "The engine could not be reached: {detail}.",
    "engine_timeout": "The ticket was not scored within its deadline of {deadline} seconds.",
    "engine_refused": "The engine refused this ticket: {detail}.",
    "engine_dropped": "The engine closed the connection over this ticket, more than once.",
    "invalid_answer": "The engine's answer failed validation: {detail}.",
    "topic_refused": "Topic '{topic}' did not take the ticket: {detail}.",
    "internal_error": "The worker failed on this ticket: {detail}.",
}
"""Every reason code, with the sentence people read. The list is closed."""


def reason(code: str, **values: object) -> Reason:
    """The code with its sentence filled in. Raises KeyError on an unknown code or a missing value."""
    return Reason(code, REASONS[code].format(**values))


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration in force: an artefact whose fingerprints match what is running."""

    artefact: Artefact


@dataclass(frozen=True, slots=True)
class NoCalibration:
    """Why nothing may be routed by score."""

    reason: Reason


def calibration_in_force(artefact: Artefact | None, now: Fingerprints) -> Calibration | NoCalibration:
    """The artefact, unless there is none or it was fitted on anything else than what runs now."""
    if artefact is None:
        return NoCalibration(reason("uncalibrated", detail="run `ticket-router calibrate`"))
    changed = artefact.fingerprints.differences(now)
    if changed:
        return NoCalibration(reason("fingerprint_changed", detail=", ".join(changed)))
    return Calibration(artefact)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a ticket, and why."""

    action: Literal["route", "escalate"]
    topic: str
    category: str | None
    reasons: tuple[Reason, ...]
    probability: float | None = None
    top: tuple[Ranked, ...] = ()
    margin: float | None = None
    scores: LabelScores | None = None


def decide_override(ticket: Ticket, rule_set: RuleSet) -> Decision | None:
    """What the rules say without a score; None where they leave it to the score. The first match decides."""
    for rule in rule_set.rules.overrides:
        if not rule.matches(ticket):
            continue
        if rule.kind != "keyword" and rule.then == "route" and rule.category is not None:
            return Decision(
                "route",
                rule_set.categories.topic(rule.category),
                rule.category,
                (reason("override", name=rule.name),),
            )
        return escalate_unscored(rule_set, reason("override_escalation", name=rule.name))
    return None


def escalate_unscored(rule_set: RuleSet, why: Reason) -> Decision:
    """To people, without scores."""
    return Decision("escalate", rule_set.human_topic, None, (why,))


def decide(scores: LabelScores, rule_set: RuleSet, calibration: Calibration | NoCalibration) -> Decision:
    """Route or escalate a scored ticket. `scores` are in label order, as long as the category set."""
    ids = rule_set.categories.ids
    if len(scores.logprobs) != len(ids):
        raise ValueError(f"{len(scores.logprobs)} scores for {len(ids)} categories")
    if isinstance(calibration, NoCalibration):
        best = max(range(len(ids)), key=scores.logprobs.__getitem__)
        return Decision("escalate", rule_set.human_topic, ids[best], (calibration.reason,), scores=scores)

    artefact = calibration.artefact
    probabilities = artefact.calibrator.apply_one(scores.logprobs)
    routed = max_probability(probabilities) if artefact.form == "max_probability" else raw_margin(scores.logprobs)
    category = ids[routed.index]
    order = sorted(range(len(ids)), key=probabilities.__getitem__, reverse=True)
    why, passed = _gates(category, routed, scores, probabilities, rule_set, artefact)
    return Decision(
        action="route" if passed else "escalate",
        topic=rule_set.categories.topic(category) if passed else rule_set.human_topic,
        category=category,
        reasons=(why,),
        probability=chance_of_being_right(artefact, probabilities, routed.index),
        top=tuple(Ranked(ids[i], probabilities[i]) for i in order[:TOP]),
        margin=probabilities[order[0]] - probabilities[order[1]],
        scores=scores,
    )


def chance_of_being_right(artefact: Artefact, probabilities: Sequence[float], index: int) -> float:
    """P(the label at `index` is right), tickets of no category counted as wrong where that was fitted."""
    if artefact.correctness is None or artefact.form != "max_probability":
        return probabilities[index]
    return artefact.correctness.apply_one(probabilities[index])


def _gates(
    category: str,
    routed: RoutedLabel,
    scores: LabelScores,
    probabilities: Sequence[float],
    rule_set: RuleSet,
    artefact: Artefact,
) -> tuple[Reason, bool]:
    """The first gate that does not open, or the certificate under which the ticket routes."""
    floor = max(rule_set.rules.gates.min_label_mass, artefact.min_label_mass)
    if scores.mass < floor:
        return reason("low_label_mass", mass=_share(scores.mass), floor=_share(floor)), False
    if category == NONE_ID:
        return reason("none_of_the_above"), False
    gate = artefact.margin_gate
    if gate is not None:
        margin = raw_margin(probabilities if artefact.form == "max_probability" else scores.logprobs).score
        if not gate.passes(margin):
            return reason("inside_flip_band", margin=f"{margin:.4g}", gate=f"{gate.m_star:.4g}"), False
    certificate = artefact.by_category.get(category)
    if certificate is None:
        return reason("uncertified_category", category=category, detail="it was never calibrated"), False
    if not certificate.certified:
        return reason("uncertified_category", category=category, detail=certificate.summary()), False
    per_ticket = certificate.procedure == "misroutes_per_ticket"
    alpha, delta = rule_set.demand(category)
    looser_target = per_ticket and rule_set.rules.target != "misroutes_per_ticket"
    if looser_target or certificate.alpha > alpha or certificate.delta > delta:
        stated = f"{_promise(certificate.alpha, per_ticket)} (delta {_share(certificate.delta)})"
        demanded = f"{_promise(alpha, per_ticket and not looser_target)} (delta {_share(delta)})"
        return reason("certificate_too_weak", category=category, stated=stated, demanded=demanded), False
    score, threshold = f"{routed.score:.4g}", f"{certificate.lambda_:.4g}"
    if not certificate.routes(routed.score):
        return reason("below_threshold", score=score, threshold=threshold), False
    promise, confidence = _promise(certificate.alpha, per_ticket), _share(1 - certificate.delta)
    return reason("certified", score=score, threshold=threshold, promise=promise, confidence=confidence), True


def _promise(alpha: float, per_ticket: bool) -> str:
    return (
        f"{_share(alpha)} of all tickets are misrouted" if per_ticket else f"{_share(alpha)} of such tickets are wrong"
    )


def _share(value: float) -> str:
    return f"{value * 100:.3g} %"
