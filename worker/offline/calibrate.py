"""Calibration: labelled scores to the artefact that the worker obeys, and everything the report shows beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.core.artefact import Artefact
from worker.core.calibration import Calibrator, CorrectnessCalibrator
from worker.core.categories import NONE_ID
from worker.core.certificates import Certificate, MarginGate, ScoreForm
from worker.core.correctness import fit_correctness
from worker.core.guarantees import margin_gate, n_min
from worker.core.rules import RuleSet
from worker.core.score_form import FIT_SHARE, choose_form, fit_part, raw_margin, routed_label
from worker.core.selection import Selection, select
from worker.errors import ConfigError
from worker.offline.certification import Candidate, Plan, Target, candidates, certify_candidates
from worker.offline.cross_fitting import cross_fitted_correctness, cross_fitted_probabilities
from worker.offline.measures import Measures, measure
from worker.offline.near_duplicates import RULE, letters, pack_digests
from worker.offline.scoring import ScoredTicket
from worker.offline.screening import Screened, reaching_the_score, screen_tickets
from worker.runtime.question import Question

Floats = NDArray[np.float64]
Pair = tuple[ScoredTicket, ScoredTicket]
"""One ticket scored twice."""

FEW_LABELS = 1
"""A category with no more labels than this is never routed."""


@dataclass(frozen=True, slots=True)
class Position:
    """One place in the label order: how often the labelled tickets belong there and how often they are put there.

    `bias` is what the calibrator adds to this label, in nats.
    """

    category: str
    labelled: int
    predicted_raw: int
    predicted_calibrated: int
    bias: float


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The artefact, and what the report needs to explain it.

    `certifying` are the tickets that the certificates count; `before` and `after` measure them under the raw softmax
    and as people will see them, by calibrators that did not see their labels (cross-fitted where they are the same).
    """

    artefact: Artefact
    rule_set: RuleSet
    plan: Plan
    screened: Screened
    form_reason: str
    selection: Selection
    certifying: tuple[Candidate, ...]
    confidence: tuple[float, ...]
    """Per certifying ticket: the probability behind `after`."""
    before: Measures
    after: Measures
    positions: tuple[Position, ...]
    excluded: Mapping[str, str]
    """Category to the reason why it never routes."""

    @property
    def certificates(self) -> tuple[Certificate, ...]:
        return self.artefact.certificates

    @property
    def routed(self) -> tuple[Candidate, ...]:
        """The certifying tickets that the artefact routes."""
        return tuple(row for row in self.certifying if self._routes(row))

    def _routes(self, row: Candidate) -> bool:
        certificate = self.artefact.by_category.get(self.artefact.labels[row.predicted])
        return row.gate is None and certificate is not None and certificate.routes(row.score)


def calibrate(
    question: Question,
    scored: Iterable[ScoredTicket],
    *,
    seed: int,
    created_at: str,
    alpha: float | None = None,
    delta: float | None = None,
    joint: bool = False,
    target: Target = "error_among_routed",
    form: ScoreForm | None = None,
    unlabelled: Sequence[ScoredTicket] = (),
    repeated: Sequence[Pair] = (),
    parents: Mapping[str, str] | None = None,
) -> CalibrationResult:
    """Calibrate and certify. The same tickets in any order, arguments and seed give the same artefact to the last bit.

    `alpha` and `delta` take the place of the rule set's own, not of what it states for single categories. `created_at`
    is an ISO 8601 time. `form` forces the score form (to compare; it must not be chosen by its result). `unlabelled`
    fixes the thresholds beforehand, which drops the assumption on how risk changes with strictness. `repeated` are
    tickets scored twice, best unlabelled ones, for the margin gate. Raises ConfigError where no ticket can be used.
    """
    rule_set = question.rule_set
    chosen_alpha = rule_set.rules.alpha if alpha is None else alpha
    chosen_delta = rule_set.rules.delta if delta is None else delta
    labelled = screen_tickets(scored, rule_set)
    usable = labelled.usable
    fits = np.array(fit_part(ticket.id for ticket in usable))
    z, y = _arrays(usable)
    fit_selection = select(z[fits], y[fits], seed=seed)
    chosen, form_reason = _choose_form(len(usable), n_min(chosen_alpha, chosen_delta), fit_selection, form)
    split = chosen == "max_probability"
    selection = fit_selection if split else select(z, y, seed=seed)
    trained = fits if split else np.ones(len(usable), dtype=np.bool_)
    excluded = _excluded(rule_set, y[trained], "the fit part" if split else "the file")
    plan = Plan(
        chosen_alpha, chosen_delta, chosen, joint, target, frozenset(excluded), parents or rule_set.categories.parents
    )

    gate = _margin_gate(repeated, rule_set, chosen, selection.calibrator)
    opened = Artefact(
        rule_set=rule_set.id,
        created_at=created_at,
        engine=question.identity.engine,
        model_name=question.identity.model,
        labels=rule_set.categories.ids,
        fingerprints=question.fingerprints,
        form=chosen,
        min_label_mass=rule_set.rules.gates.min_label_mass,
        calibrator=selection.calibrator,
        certificates=(),
        margin_gate=gate,
        data={},
    )
    held_out = tuple(ticket for ticket, is_fit in zip(usable, fits.tolist(), strict=True) if not (split and is_fit))
    certifying = candidates(held_out, rule_set, opened)
    if not certifying:
        raise ConfigError(f"none of {len(usable)} usable labelled tickets is left to certify: label more")
    others = candidates(_independent(unlabelled, labelled, rule_set), rule_set, opened) if unlabelled else None
    try:
        certificates = certify_candidates(certifying, rule_set, plan, others)
    except ValueError as error:
        raise ConfigError(f"nothing can be certified: {error}") from error
    gain, gain_se = fit_selection.accuracy_gain, fit_selection.accuracy_gain_se
    stamps = tuple(question.fingerprints.model_dump().items())
    grown = partial(choose_form, n_min=n_min(chosen_alpha, chosen_delta), gain=gain, gain_se=gain_se)
    certificates = tuple(
        replace(
            c,
            fingerprints=stamps,
            certified_on=created_at[:10],
            to_label=_to_label(c, labelled, chosen, grown if form is None else lambda _: chosen),
        )
        for c in certificates
    )

    right = [int(not row.wrong) for row in certifying]
    correctness = fit_correctness([row.probability for row in certifying], right, seed=seed) if split else None
    before, after, confidence = _measured(certifying, selection, correctness, seed)
    artefact = opened.model_copy(
        update={
            "certificates": certificates,
            "correctness": correctness,
            "data": {
                **_data(labelled, certifying, plan, excluded),
                "fitted": int(fits.sum()) if split else 0,
                "unlabelled": len(others or ()),
                "seed": seed,
            },
            "metrics": {"before": before.to_dict(), "after": after.to_dict()},
            "notes": _notes(question, form_reason, gate),
        }
    ).sealed()
    return CalibrationResult(
        artefact=artefact,
        rule_set=rule_set,
        plan=plan,
        screened=labelled,
        form_reason=form_reason,
        selection=selection,
        certifying=certifying,
        confidence=confidence,
        before=before,
        after=after,
        positions=_positions(rule_set, held_out, selection.calibrator),
        excluded=excluded,
    )


def _choose_form(n: int, fewest: int, fitted: Selection, forced: ScoreForm | None) -> tuple[ScoreForm, str]:
    """The score form, and why in one sentence."""
    gain = f"{100 * fitted.accuracy_gain:+.1f} ± {100 * fitted.accuracy_gain_se:.1f} points of accuracy"
    if forced is not None:
        return forced, "asked for"
    if choose_form(n, fewest, fitted.accuracy_gain, fitted.accuracy_gain_se) == "max_probability":
        return "max_probability", f"{n} usable labels; on the fit part the calibrator brings {gain}"
    if (1.0 - FIT_SHARE) * n < 2 * fewest:
        return "raw_margin", f"{n} usable labels are too few to set some apart for fitting"
    return "raw_margin", f"on the fit part the calibrator brings no sure gain ({gain})"


def _to_label(
    certificate: Certificate, labelled: Screened, form: ScoreForm, form_of: Callable[[int], ScoreForm]
) -> int | None:
    """How many more tickets of the file's kind to label until `need` count for a certificate, in two digits.

    `form_of` is the score form that so many usable labels bring: from raw margin to split, fewer of them certify. None
    where no number of them is known to do.
    """
    missing, n, usable = certificate.missing, certificate.n, len(labelled.usable)
    if not missing or not n or certificate.need is None:
        return None
    total = certificate.need * usable / n
    if form == "raw_margin" and form_of(math.ceil(total)) == "max_probability":
        total /= 1.0 - FIT_SHARE
    more = (total - usable) * labelled.labelled / usable
    step: int = 10 ** max(0, len(str(math.ceil(more))) - 2)
    return math.ceil(more / step) * step


def _excluded(rule_set: RuleSet, labels: NDArray[np.int64], where: str) -> dict[str, str]:
    """Routable categories with too few labels, with the reason.

    In the split form the labels that certify have no say in it. In the raw form they have: a category without a second
    label among them has nothing to be certified with.
    """
    count = np.bincount(labels[labels >= 0], minlength=len(rule_set.categories.ids)).tolist()
    return {
        category: f"{times} labelled tickets in {where}" if times != 1 else f"a single labelled ticket in {where}"
        for category, times in zip(rule_set.categories.ids, count, strict=True)
        if category != NONE_ID and times <= FEW_LABELS
    }


def _margin_gate(
    repeated: Sequence[Pair], rule_set: RuleSet, form: ScoreForm, calibrator: Calibrator
) -> MarginGate | None:
    """From pairs that were both scored; the margin is that of the first, as a worker scores a ticket once."""
    if not repeated:
        return None
    floor = rule_set.rules.gates.min_label_mass
    reaching = {t.id for t in reaching_the_score([first for first, _ in repeated], rule_set) if t.mass >= floor}
    margins, flips = [], []
    for first, second in repeated:
        if first.id not in reaching or second.problem is not None:
            continue
        vector = calibrator.apply_one(first.logprobs) if form == "max_probability" else first.logprobs
        labels = [routed_label(form, calibrator, ticket.logprobs).index for ticket in (first, second)]
        margins.append(raw_margin(vector).score)
        flips.append(int(labels[0] != labels[1]))
    return margin_gate(margins, flips)


def _independent(unlabelled: Sequence[ScoredTicket], labelled: Screened, rule_set: RuleSet) -> list[ScoredTicket]:
    """Those that are no near-duplicates of labelled tickets either."""
    seen = {letters(ticket.text) for ticket in labelled.collapsed.kept}
    return [t for t in reaching_the_score(unlabelled, rule_set) if letters(t.text) not in seen]


def _measured(
    certifying: Sequence[Candidate], selection: Selection, correctness: CorrectnessCalibrator | None, seed: int
) -> tuple[Measures, Measures, tuple[float, ...]]:
    """Before and after calibration, by calibrators that did not see the labels they are measured on."""
    z, y = _arrays([row.ticket for row in certifying])
    labels, predicted = y.tolist(), [row.predicted for row in certifying]
    raw = Calibrator.identity(z.shape[1]).apply(z)
    before = measure(raw, raw.argmax(axis=1).tolist(), raw.max(axis=1).tolist(), labels, seed=seed)
    if correctness is None:
        probabilities = cross_fitted_probabilities(z, y, selection.candidate, seed)
        confidence = [float(p[i]) for p, i in zip(probabilities, predicted, strict=True)]
    else:
        probabilities = selection.calibrator.apply(z)
        max_p, right = [row.probability for row in certifying], [int(not row.wrong) for row in certifying]
        confidence = cross_fitted_correctness(max_p, right, correctness.kind, seed)
    return before, measure(probabilities, predicted, confidence, labels, seed=seed), tuple(confidence)


def _positions(rule_set: RuleSet, tickets: Sequence[ScoredTicket], calibrator: Calibrator) -> tuple[Position, ...]:
    z, y = _arrays(tickets)
    size = z.shape[1]
    labelled = np.bincount(y[y >= 0], minlength=size).tolist()
    raw = np.bincount(z.argmax(axis=1), minlength=size).tolist()
    calibrated = np.bincount(calibrator.apply(z).argmax(axis=1), minlength=size).tolist()
    rows = zip(rule_set.categories.ids, labelled, raw, calibrated, calibrator.bias, strict=True)
    return tuple(Position(*row) for row in rows)


def _data(
    labelled: Screened,
    certifying: Sequence[Candidate],
    plan: Plan,
    excluded: Mapping[str, str],
) -> dict[str, Any]:
    """What the artefact says about the tickets behind it."""
    split = f"sha256 of the ticket id, {FIT_SHARE:.0%} to fit"
    return {
        "labelled": labelled.labelled,
        "labelled_digest": labelled.digest,
        "near_duplicates": len(labelled.collapsed.dropped),
        "near_duplicates_with_another_label": len(labelled.collapsed.conflicting),
        "near_duplicate_rule": RULE,
        "decided_by_rules": len(labelled.overridden),
        "unscored": dict(sorted(Counter(t.problem or "" for t in labelled.unscored).items())),
        "low_label_mass": len(labelled.low_mass),
        "usable": len(labelled.usable),
        "certifying": len(certifying),
        "gated": dict(sorted(Counter(row.gate for row in certifying if row.gate is not None).items())),
        "split": split if plan.form == "max_probability" else "none: certified on all labels",
        "target": plan.target,
        "joint": plan.joint,
        "never_routed": dict(excluded),
        "seen": pack_digests(labelled.collapsed.kept),
    }


def _notes(question: Question, form_reason: str, gate: MarginGate | None) -> tuple[str, ...]:
    notes = [*question.identity.notes, f"score form: {form_reason}"]
    notes.append("stability unmeasured: no ticket was scored twice" if gate is None else gate.summary())
    return tuple(notes)


def _arrays(tickets: Sequence[ScoredTicket]) -> tuple[Floats, NDArray[np.int64]]:
    """(n, K) log-probabilities and (n,) labels."""
    z = np.array([ticket.logprobs for ticket in tickets], dtype=np.float64)
    return z, np.array([ticket.label for ticket in tickets], dtype=np.int64)
