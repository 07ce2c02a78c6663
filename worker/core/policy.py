"""The only evaluator: one ticket and its label scores to one decision, which carries its own reasons.

Nothing routes on an uncalibrated score: the label that is routed and the number that is compared with the threshold
are those that the certificate was issued for, or the ticket goes to people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from worker.core.artefact import Artefact, Fingerprints
from worker.core.categories import NONE_ID
from worker.core.certificates import Certificate
from worker.core.envelope import Allowance, Answer, Nearest, Ranked, Reason
from worker.core.partial_scores import Range, settle
from worker.core.per_ticket import per_ticket
from worker.core.rules import RuleSet
from worker.core.score_form import max_probability, raw_margin
from worker.core.scores import LabelScores
from worker.core.ticket import Ticket

GateName = Literal["label_mass", "none_of_the_above", "stability", "certificate", "threshold"]
TOP = 3
"""How many categories a decision names."""

REASONS: Mapping[str, str] = {
    "certified": "The score {score} is above the certified threshold {threshold}: at most {promise}, with {confidence} "
    "confidence.",
    "override": "Rule '{name}' routes this ticket without a score.",
    "override_escalation": "Rule '{name}' sends this ticket to a person.",
    "answer_escalation": "Rule '{name}' sends this ticket to a person: to question '{question}', {what}.",
    "question_unanswered": "Rule '{name}' sends this ticket to a person: question '{question}' has no answer to go by "
    "({detail}).",
    "below_threshold": "The score {score} is not above the certified threshold {threshold}.",
    "inside_flip_band": "The first two are {margin} apart, and below {gate} the engine may change its mind when asked "
    "again.",
    "uncertified_category": "Category '{category}' has no certificate: {detail}.",
    "certificate_too_weak": "The certificate of '{category}' states at most {stated}, and the rules demand at most "
    "{demanded}.",
    "low_label_mass": "The labels together have probability {mass}, and {floor} is demanded: the model wants to say "
    "something else.",
    "label_not_returned": "The engine did not return {missing} of {labels} labels, and they could change {what}.",
    "none_of_the_above": "The model finds that no category fits.",
    "uncalibrated": "There is no calibration for this rule set: {detail}.",
    "fingerprint_changed": "The calibration was fitted on something else: {detail} changed.",
    "labels_untrusted": "The engine failed the start-up check: {detail}.",
    "too_long": "The ticket is too long: {detail}.",
    "truncated": "Only the head and the tail of the ticket were read: more than {tokens} tokens are too much.",
    "steered": "Without {parts} that may speak to the router rather than the desk, {what}.",
    "other_order": "Asked with the categories in another order, the model names '{category}'.",
    "over_quota": "The ticket's tenant sent more than {characters} characters within a minute.",
    "engine_unavailable": "The engine could not be reached: {detail}.",
    "engine_timeout": "The ticket was not scored within its deadline of {deadline} seconds.",
    "engine_refused": "The engine refused this ticket: {detail}.",
    "engine_dropped": "The engine closed the connection over this ticket, more than once.",
    "invalid_answer": "The engine's answer failed validation: {detail}.",
    "shadow_mode": "Shadow mode: people decide, and are shown no suggestion.",
    "assist_mode": "Assist mode: people decide; it would have gone to '{category}'.",
    "topic_refused": "Topic '{topic}' did not take the ticket: {detail}.",
    "internal_error": "The worker failed on this ticket: {detail}.",
}
"""Every reason code, with the sentence people read. The list is closed."""

BOUNDS: Mapping[str, str] = {"certified": "threshold", "inside_flip_band": "gate"}
"""The value that a code's sentence compares with. An infinite one is none: no record of a decision has it then."""

WITHOUT_BOUND: Mapping[str, str] = {
    "certified": "Every ticket predicted as '{category}' is certified, whatever its score ({score} here): at most "
    "{promise}, with {confidence} confidence.",
    "inside_flip_band": "The first two are {margin} apart, and the engine may change its mind at any distance when "
    "asked again.",
}
"""What is said in place of `REASONS` where there is no such bound."""


def reason(code: str, **values: object) -> Reason:
    """The code with its sentence filled in. Raises KeyError on an unknown code or a missing value."""
    said = {name: str(value) for name, value in values.items()}
    sentence = WITHOUT_BOUND[code] if lacks_bound(code, said) else REASONS[code]
    return Reason(code, sentence.format(**said), said)


def lacks_bound(code: str, said: Mapping[str, str]) -> bool:
    """Whether the sentence is the one of `WITHOUT_BOUND`."""
    return code in BOUNDS and BOUNDS[code] not in said


@dataclass(frozen=True, slots=True)
class Bar:
    """What a category's tickets have to pass under one calibration and rule set, and how that is said."""

    certificate: Certificate | Reason | None
    """The one in force, or why none that suffices is; None for `none`."""
    allowance: Allowance | None = None
    threshold: str | None = None
    """None where any score passes."""
    promise: str = ""
    confidence: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration in force: an artefact whose fingerprints match what is running."""

    artefact: Artefact
    _bars: dict[tuple[str, str], Bar] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Found once, by the rule set's fingerprint and the category: they are the same for every ticket."""

    def bar(self, category: str, rule_set: RuleSet) -> Bar:
        place = rule_set.fingerprint, category
        bar = self._bars.get(place)
        if bar is None:
            bar = self._bars[place] = _bar(category, rule_set, self.artefact)
        return bar


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


@per_ticket
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
    answers: tuple[Answer, ...] = ()
    """To the rule set's further questions."""
    nearest: Nearest | None = None
    """How near the score came, or what it passed; None without scores or without a calibration."""


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


def vetoed(decision: Decision, rule_set: RuleSet, why: Reason) -> Decision:
    """The same for people: what would have routed does not, for this reason."""
    return replace(decision, action="escalate", topic=rule_set.human_topic, reasons=(why,))


def carried_out(decision: Decision, rule_set: RuleSet) -> Decision:
    """What is done of a decision in the mode of its category: itself in auto, and every escalation is itself. Routes
    go to people in shadow and assist, whoever said so: a score, or a rule that reads no score.
    """
    if decision.action != "route":
        return decision
    mode = rule_set.mode_of(decision.category)
    if mode == "auto":
        return decision
    why = reason("shadow_mode") if mode == "shadow" else reason("assist_mode", category=decision.category)
    return vetoed(decision, rule_set, why)


def read_in_part(decision: Decision, rule_set: RuleSet, tokens: int) -> Decision:
    """The decision about a ticket of which so many tokens were read: it says so, and routes only where that may be."""
    why = reason("truncated", tokens=tokens)
    if decision.action == "route" and rule_set.rules.length.when_cut == "escalate":
        return vetoed(decision, rule_set, why)
    return replace(decision, reasons=(*decision.reasons, why))


def decide(scores: LabelScores, rule_set: RuleSet, calibration: Calibration | NoCalibration) -> Decision:
    """Route or escalate a scored ticket. `scores` are in label order, as long as the category set."""
    ids = rule_set.categories.ids
    if len(scores.logprobs) != len(ids):
        raise ValueError(f"{len(scores.logprobs)} scores for {len(ids)} categories")
    if isinstance(calibration, NoCalibration):
        return Decision("escalate", rule_set.human_topic, ids[scores.best_known], (calibration.reason,), scores=scores)

    artefact = calibration.artefact
    if scores.unknown:
        return _decide_partial(scores, rule_set, calibration)
    probabilities = artefact.calibrator.apply_one(scores.logprobs)
    routed = max_probability(probabilities) if artefact.form == "max_probability" else raw_margin(scores.logprobs)
    category = ids[routed.index]
    order = sorted(range(len(ids)), key=probabilities.__getitem__, reverse=True)
    margin = math.inf
    if artefact.margin_gate is not None:
        margin = raw_margin(probabilities if artefact.form == "max_probability" else scores.logprobs).score
    score, lead = Range.exactly(routed.score), Range.exactly(margin)
    why, nearest = _gates(category, score, lead, scores, rule_set, calibration)
    passed = nearest.gate is None
    return Decision(
        action="route" if passed else "escalate",
        topic=rule_set.categories.topic(category) if passed else rule_set.human_topic,
        category=category,
        reasons=(why,),
        probability=chance_of_being_right(artefact, probabilities, routed.index),
        top=tuple(Ranked(ids[i], probabilities[i]) for i in order[:TOP]),
        margin=probabilities[order[0]] - probabilities[order[1]],
        scores=scores,
        nearest=nearest,
    )


def _decide_partial(scores: LabelScores, rule_set: RuleSet, calibration: Calibration) -> Decision:
    """A ticket some of whose labels the engine did not return. It routes only where it would whatever they are; every
    number that is stated is the least possible one.
    """
    ids, artefact = rule_set.categories.ids, calibration.artefact
    settled = settle(artefact.form, artefact.calibrator, scores)
    if settled is None:
        low_mass = _mass_gate(scores, rule_set, artefact)
        why = low_mass or _not_returned(scores, "which label is the first")
        return Decision("escalate", rule_set.human_topic, ids[scores.best_known], (why,), scores=scores)
    category = ids[settled.index]
    why, nearest = _gates(category, settled.score, settled.margin, scores, rule_set, calibration)
    passed = nearest.gate is None
    known = [place for place in range(len(ids)) if place not in scores.unknown]
    order = sorted(known, key=settled.at_least.__getitem__, reverse=True)
    return Decision(
        action="route" if passed else "escalate",
        topic=rule_set.categories.topic(category) if passed else rule_set.human_topic,
        category=category,
        reasons=(why,),
        probability=chance_of_being_right(artefact, settled.at_least, settled.index),
        top=tuple(Ranked(ids[i], settled.at_least[i]) for i in order[:TOP]),
        margin=settled.margin.low if artefact.form == "max_probability" else None,
        scores=scores,
        nearest=nearest,
    )


def chance_of_being_right(artefact: Artefact, probabilities: Sequence[float], index: int) -> float:
    """P(the label at `index` is right), tickets of no category counted as wrong where that was fitted."""
    if artefact.correctness is None or artefact.form != "max_probability":
        return probabilities[index]
    return artefact.correctness.apply_one(probabilities[index])


def _mass_gate(scores: LabelScores, rule_set: RuleSet, artefact: Artefact) -> Reason | None:
    """Why the label mass does not suffice, None where it does."""
    floor = max(rule_set.rules.gates.min_label_mass, artefact.min_label_mass)
    if scores.mass_at_most < floor:
        return reason("low_label_mass", mass=_share(scores.mass_at_most), floor=_share(floor))
    return _not_returned(scores, "whether the labels have enough probability") if scores.mass < floor else None


def _not_returned(scores: LabelScores, what: str) -> Reason:
    return reason("label_not_returned", missing=len(scores.unknown), labels=len(scores.logprobs), what=what)


def _gates(
    category: str, score: Range, margin: Range, scores: LabelScores, rule_set: RuleSet, calibration: Calibration
) -> tuple[Reason, Nearest]:
    """The first gate that does not open, or the certificate under which the ticket routes.

    `score` and `margin` are ranges where labels are unknown: a gate opens where it would for all of a range, refuses
    where it would for all of it, and else the ticket goes to people for the unknown labels' sake.
    """
    artefact, bar = calibration.artefact, calibration.bar(category, rule_set)
    certificate, allowance = bar.certificate, bar.allowance

    def closed(at: GateName, value: float | None, needed: float | None) -> Nearest:
        return Nearest(category, at, value, needed, score.low, artefact.form, allowance)

    if (low_mass := _mass_gate(scores, rule_set, artefact)) is not None:
        floor = max(rule_set.rules.gates.min_label_mass, artefact.min_label_mass)
        return low_mass, closed("label_mass", scores.mass, floor)
    if certificate is None:
        return reason("none_of_the_above"), closed("none_of_the_above", None, None)
    gate = artefact.margin_gate
    if gate is not None and not gate.passes(margin.low):
        nearest = closed("stability", margin.low, gate.m_star if math.isfinite(gate.m_star) else None)
        if gate.passes(margin.high):
            return _not_returned(scores, "by how much the first label leads"), nearest
        bound = {"gate": f"{gate.m_star:.4g}"} if math.isfinite(gate.m_star) else {}
        return reason("inside_flip_band", margin=f"{margin.high:.4g}", **bound), nearest
    if isinstance(certificate, Reason):
        return certificate, closed("certificate", None, None)
    threshold = bar.threshold
    if not certificate.routes(score.low):
        nearest = closed("threshold", score.low, certificate.lambda_)
        if certificate.routes(score.high):
            return _not_returned(scores, f"whether the score is above the threshold {threshold}"), nearest
        return reason("below_threshold", score=f"{score.high:.4g}", threshold=threshold), nearest
    passed = {"threshold": threshold} if threshold is not None else {"category": category}
    why = reason("certified", score=f"{score.low:.4g}", **passed, promise=bar.promise, confidence=bar.confidence)
    return why, Nearest(category, None, None, None, score.low, artefact.form, allowance)


def _bar(category: str, rule_set: RuleSet, artefact: Artefact) -> Bar:
    if category == NONE_ID:
        return Bar(None)
    certificate = _certificate_in_force(category, rule_set, artefact)
    if isinstance(certificate, Reason):
        return Bar(certificate)
    per_ticket = certificate.procedure == "misroutes_per_ticket"
    return Bar(
        certificate,
        _allowance(certificate),
        threshold=f"{certificate.lambda_:.4g}" if math.isfinite(certificate.lambda_) else None,
        promise=_promise(certificate.alpha, per_ticket),
        confidence=_share(1 - certificate.delta),
    )


def _allowance(certificate: Certificate) -> Allowance:
    threshold = certificate.lambda_ if math.isfinite(certificate.lambda_) else None
    alpha, delta = certificate.alpha, certificate.delta
    return Allowance(certificate.group, threshold, alpha, delta, certificate.procedure)


def can_route(category: str, rule_set: RuleSet, calibration: Calibration | NoCalibration) -> bool:
    """Whether any score at all would route a ticket to this category."""
    return why_never(category, rule_set, calibration) is None


def why_never(category: str, rule_set: RuleSet, calibration: Calibration | NoCalibration) -> Reason | None:
    """Why no score at all would route a ticket to this category; None where one would."""
    if isinstance(calibration, NoCalibration):
        return calibration.reason
    if category == NONE_ID:
        return reason("none_of_the_above")
    certificate = _certificate_in_force(category, rule_set, calibration.artefact)
    return certificate if isinstance(certificate, Reason) else None


def _certificate_in_force(category: str, rule_set: RuleSet, artefact: Artefact) -> Certificate | Reason:
    """The category's certificate, or why none that suffices is there."""
    certificate = artefact.by_category.get(category)
    if certificate is None:
        return reason("uncertified_category", category=category, detail="it was never calibrated")
    if not certificate.certified:
        return reason("uncertified_category", category=category, detail=certificate.summary())
    per_ticket = certificate.procedure == "misroutes_per_ticket"
    alpha, delta = rule_set.demand(category)
    looser_target = per_ticket and rule_set.rules.target != "misroutes_per_ticket"
    if looser_target or certificate.alpha > alpha or certificate.delta > delta:
        stated = f"{_promise(certificate.alpha, per_ticket)} (delta {_share(certificate.delta)})"
        demanded = f"{_promise(alpha, per_ticket and not looser_target)} (delta {_share(delta)})"
        return reason("certificate_too_weak", category=category, stated=stated, demanded=demanded)
    return certificate


def _promise(alpha: float, per_ticket: bool) -> str:
    return (
        f"{_share(alpha)} of all tickets are misrouted" if per_ticket else f"{_share(alpha)} of such tickets are wrong"
    )


def promised(allowance: Allowance) -> str:
    """What a certificate states, as the reason of what it routes says it."""
    promise = _promise(allowance.alpha, allowance.procedure == "misroutes_per_ticket")
    return f"at most {promise}, with {_share(1 - allowance.delta)} confidence"


def _share(value: float) -> str:
    return f"{value * 100:.3g} %"
